"""The package's imports run one way, so that each module can be read with nothing but those below it in mind."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import idempotency

ROOT = Path(idempotency.__file__).parent

#: From the bottom up. A module imports from layers below its own, or from its own.
LAYERS = [
    {"conf", "exceptions", "lifecycle", "options", "policy"},
    {"fingerprint", "keys", "operation", "parsing", "scope"},
    {"models", "outcome", "signals"},
    {"sql"},
    {"protocol"},
    {"http", "upkeep", "log"},
    {"outbox"},
    {"admin", "checks", "contrib", "management", "migrations", "tasks"},
    {"apps"},
]
HEIGHT = {module: height for height, layer in enumerate(LAYERS) for module in layer}

FILES = sorted(ROOT.rglob("*.py"))

#: An import inside a function, for a reason given where it stands, or for a type.
DEFERRED: set[tuple[str, str]] = set()


def imported_by(file: Path) -> set[str]:
    """The modules of the package that ``file`` imports, by the first part of their name below the package."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            names = [parts[0]] if parts[0] else [alias.name for alias in node.names]
            found.update(names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "idempotency":
            found.update((node.module or "").split(".")[1:2] or [alias.name for alias in node.names])
    return found & HEIGHT.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    module = file.relative_to(ROOT).with_suffix("").parts[0]
    if module == "__init__":
        return  # the public names, resolved at first use
    above = {name for name in imported_by(file) if HEIGHT[name] > HEIGHT[module]}
    assert {(module, name) for name in above} <= DEFERRED


def test_every_module_has_its_layer() -> None:
    modules = {file.relative_to(ROOT).with_suffix("").parts[0] for file in FILES} - {"__init__"}
    assert modules <= HEIGHT.keys()


def test_the_core_imports_no_integration() -> None:
    for file in FILES:
        if "contrib" in file.parts or file == ROOT / "tasks.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"rest_framework", "celery", "psycopg", "httpx", "requests", "tenacity", "environ"}, file


def test_the_decision_table_imports_nothing_of_django() -> None:
    source = (ROOT / "lifecycle.py").read_text()
    assert "django" not in {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for name in [node.module or ""]
    }


def test_the_public_names_are_complete() -> None:
    assert set(idempotency.__all__) == set(idempotency._HOMES)
    for name in idempotency.__all__:
        assert getattr(idempotency, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = idempotency.nonsense
