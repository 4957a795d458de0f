"""CONTRIBUTING.md lists every module-level object that changes."""

import ast
import re
from contextvars import ContextVar
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from threading import local

import idempotency

PACKAGE = Path(idempotency.__file__).parent
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def listed():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text.partition("### State of a process")[2].partition("###")[0], re.MULTILINE)
    places = [place for row in rows for place in row.split("; ")]
    return {
        f"{path}: {name}"
        for path, names in (re.fullmatch(r"`([\w/.]+)`: (.+)", place).groups() for place in places)
        for name in re.findall(r"`(\w+)`", names)
    }


def assigned_in(tree):
    """The names that a module's own statements assign."""
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def changed_in(tree):
    """The names of objects whose content or attributes a module's code changes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif not isinstance(node, (ast.Subscript, ast.Attribute)) or not isinstance(node.value, ast.Name):
            continue
        elif isinstance(node.ctx, (ast.Store, ast.Del)) or getattr(node, "attr", "") in CHANGES:
            yield node.value.id


def is_mutable(value):
    """Whether a value differs by context or thread, or is an instance of a class of this package that may change."""
    kind = type(value)
    is_frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen
    is_ours = kind.__module__.startswith("idempotency.") and not isinstance(value, (type, Enum)) and not is_frozen
    return isinstance(value, (ContextVar, local)) or (is_ours and bool(getattr(value, "__dict__", None)))


def found():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        place = path.relative_to(PACKAGE)
        names = [*assigned_in(tree)]
        if names and "migrations" not in place.parts:
            module = vars(
                import_module(".".join(["idempotency", *place.with_suffix("").parts]).removesuffix(".__init__"))
            )
            changed = {*changed_in(tree)}
            yield from (f"{place}: {name}" for name in names if name in changed or is_mutable(module[name]))


def test_each_module_level_object_that_changes_is_listed():
    assert {*found()} == listed()
