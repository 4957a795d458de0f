"""The public modules, and the imports in the documentation, the sample and the messages."""

import importlib
import re
from types import FunctionType

import pytest

from idempotency.public import PUBLIC
from tests.docs.pages import ROOT

#: The modules below contrib that list public names.
CONTRIB = (
    "contrib.celery",
    "contrib.dashboard",
    "contrib.opentelemetry",
    "contrib.prometheus",
    "contrib.rest_framework",
    "contrib.rest_framework.routers",
    "contrib.spectacular",
)
MODULES = (*PUBLIC, *(f"idempotency.{name}" for name in CONTRIB))


def test_users_import_from_few_modules():
    assert len(PUBLIC) <= 11  # without contrib
    assert [*PUBLIC] == sorted(PUBLIC)


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_lists_its_names_and_owns_them(name):
    # Importing a public module sets ``__module__`` of its names.
    module = {name: importlib.import_module(name) for name in MODULES}[name]
    assert sorted(module.__all__) == sorted(set(module.__all__))
    values = {of: getattr(module, of) for of in module.__all__}
    homes = {of: value.__module__ for of, value in values.items() if isinstance(value, (type, FunctionType))}
    # A name that two public modules export has one of them as its home.
    assert {of: home for of, home in homes.items() if home not in MODULES} == {}


#: An import from the package, or a dotted path in quotes or backticks that a setting takes.
IMPORTED = re.compile(r"^\s*(?:from (idempotency[\w.]*) import|import (idempotency[\w.]*))", re.MULTILINE)
#: Other modules that the documentation and the sample may name: parts of the apps that Django finds by their path.
FOUND_BY_DJANGO = {"idempotency.contrib", "idempotency.contrib.celery.tasks"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Without the demo and the harness of the tests, which use internals.
SAMPLE = sorted((ROOT / "testproject").glob("*.py"))


@pytest.mark.parametrize("path", [*PAGES, *SAMPLE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_and_the_sample_import_public_modules_only(path):
    named = {one or other for one, other in IMPORTED.findall(path.read_text(encoding="utf-8"))}
    assert named - {*MODULES} - FOUND_BY_DJANGO == set()


def test_messages_name_public_modules_only():
    """Errors, checks and docstrings must not name private modules to import or to write into a setting."""
    private = re.compile(r"(?:\"|`)(idempotency\.(?:http|protocol|store|identity|options|conf|log)\b[\w.]*)")
    named = {
        f"{path.name}: {name}"
        for path in sorted((ROOT / "idempotency").rglob("*.py"))
        if path.name != "apps.py"  # imports modules by their path after the models
        for name in private.findall(path.read_text(encoding="utf-8"))
    }
    assert named == set()
