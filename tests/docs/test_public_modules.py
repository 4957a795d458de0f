"""The modules that users import from, and what the documentation, the sample and the messages import."""

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
    assert len(PUBLIC) <= 11  # and from contrib
    assert [*PUBLIC] == sorted(PUBLIC)


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_lists_its_names_and_owns_them(name):
    # A module that is imported makes itself the home of what it offers.
    module = {name: importlib.import_module(name) for name in MODULES}[name]
    assert sorted(module.__all__) == sorted(set(module.__all__))
    values = {of: getattr(module, of) for of in module.__all__}
    homes = {of: value.__module__ for of, value in values.items() if isinstance(value, (type, FunctionType))}
    # A name that another public module offers, too, has one of the two as its home.
    assert {of: home for of, home in homes.items() if home not in MODULES} == {}


#: An import from the package, or a dotted path in quotes or backticks that a setting takes.
IMPORTED = re.compile(r"^\s*(?:from (idempotency[\w.]*) import|import (idempotency[\w.]*))", re.MULTILINE)
#: What the documentation and the sample may name besides: the app's parts that Django finds by their path.
FOUND_BY_DJANGO = {"idempotency.contrib", "idempotency.contrib.celery.tasks"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: The demo and the harness of the tests look inside.
SAMPLE = sorted((ROOT / "testproject").glob("*.py"))


@pytest.mark.parametrize("path", [*PAGES, *SAMPLE], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_and_the_sample_import_public_modules_only(path):
    named = {one or other for one, other in IMPORTED.findall(path.read_text(encoding="utf-8"))}
    assert named - {*MODULES} - FOUND_BY_DJANGO == set()


def test_messages_name_public_modules_only():
    """What an error, a check or a docstring tells a developer to import or to write into a setting."""
    private = re.compile(r"(?:\"|`)(idempotency\.(?:http|protocol|store|identity|options|conf|log)\b[\w.]*)")
    told = {
        f"{path.name}: {name}"
        for path in sorted((ROOT / "idempotency").rglob("*.py"))
        if path.name != "apps.py"  # imports by their paths, after the models
        for name in private.findall(path.read_text(encoding="utf-8"))
    }
    assert told == set()
