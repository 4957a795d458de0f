"""The modules that users import from, and how they get their names.

A name is public if a module in ``PUBLIC`` or below ``contrib`` lists it in ``__all__``. All others may change in any
release. A public module sets the ``__module__`` of each class and function that it imports from a private one, so that
reprs, pickles and API pages show the name that users import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any, Final, TypeAlias

PUBLIC: Final = (
    "idempotency",
    "idempotency.accounts",
    "idempotency.exceptions",
    "idempotency.forms",
    "idempotency.keys",
    "idempotency.middleware",
    "idempotency.models",
    "idempotency.operate",
    "idempotency.outbox",
    "idempotency.signals",
    "idempotency.testing",
)


#: The type of a module's ``__getattr__``.
Getter: TypeAlias = Callable[[str], Any]


def adopt(module: str, values: Iterable[object]) -> None:
    """Set the ``__module__`` of each class and function."""
    for value in values:
        if isinstance(value, (type, FunctionType)):
            value.__module__ = module


def lazy(module: str, homes: Mapping[str, str]) -> Getter:
    """Make a module's ``__getattr__`` that imports each name at first use.

    An app's package needs it, because Django imports the package before it can load models.

    :param homes: for each name, the module that defines it, relative to ``module``.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(f"{module}.{homes[name]}"), name)
        adopt(module, [value])
        return value

    return get
