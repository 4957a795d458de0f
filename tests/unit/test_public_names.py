"""The names that users import, and the modules that offer them."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import idempotency
from idempotency.protocol import faults
from idempotency.public import PUBLIC

ROOT = Path(idempotency.__file__).parents[1]
#: The modules below contrib that list public names.
CONTRIB = (
    "contrib.celery",
    "contrib.dashboard",
    "contrib.httpx",
    "contrib.opentelemetry",
    "contrib.prometheus",
    "contrib.requests",
    "contrib.rest_framework",
    "contrib.rest_framework.routers",
    "contrib.retrying",
    "contrib.spectacular",
)
MODULES = (*PUBLIC, *(f"idempotency.{name}" for name in CONTRIB))


def in_a_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_public_names_are_listed_before_their_first_use():
    listed = in_a_new_process("import idempotency; print(*dir(idempotency))").stdout.split()
    assert {*idempotency.__all__, "__version__"} <= {*listed}


def test_a_missing_entry_in_installed_apps_is_named():
    code = "from django.conf import settings as s; s.configure(); import django; django.setup(); import idempotency"
    ended = in_a_new_process(f"{code}; idempotency.idempotent")
    assert ended.returncode == 1
    assert "ImproperlyConfigured: 'idempotency' is used, but it is not in INSTALLED_APPS. Add it" in ended.stderr


def test_the_public_names_are_complete():
    for name in idempotency.__all__:
        assert getattr(idempotency, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = idempotency.nonsense


def test_every_module_logs_under_a_name_that_a_project_configures():
    modules = [module for name, module in sys.modules.items() if name.startswith("idempotency.")]
    names = {module.logger.name for module in modules if hasattr(module, "logger")}
    assert {"idempotency"} <= names <= {"idempotency", "idempotency.audit", "idempotency.events"}


def test_every_fault_point_is_one_that_the_code_passes_and_does_nothing():
    code = "".join(path.read_text() for path in Path(idempotency.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'fault_point\["([\w.]+)"\]', code)) == set(faults.PLACES)
    faults.disarm()
    assert [place for place in faults.PLACES if faults.fault_point[place]() is not None] == []


def test_users_import_from_few_modules():
    assert len(PUBLIC) <= 11  # and from contrib
    assert [*PUBLIC] == sorted(PUBLIC)


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_lists_its_names_and_owns_them(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(set(module.__all__))
    values = {of: getattr(module, of) for of in module.__all__}
    homes = {of: value.__module__ for of, value in values.items() if isinstance(value, (type, FunctionType))}
    # A name that another public module offers, too, has one of the two as its home.
    assert {of: home for of, home in homes.items() if home not in MODULES} == {}


#: An import from the package, or a dotted path in quotes or backticks that a setting takes.
IMPORTED = re.compile(r"^\s*(?:from (idempotency[\w.]*) import|import (idempotency[\w.]*))", re.MULTILINE)
#: What the documentation and the sample may name besides: the app's parts that Django finds by their path.
FOUND_BY_DJANGO = {"idempotency.contrib", "idempotency.contrib.celery.tasks", "idempotency.contrib.pytest"}
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
