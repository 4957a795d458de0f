"""The modules that users import from, and how these modules get their names.

A name is public if ``__all__`` of a module of ``PUBLIC`` lists it, or if a module below ``contrib`` does. All other
modules and names are private and may change in any release.

Public modules hold no code. They import names from the private modules that define them, and give each class and
function its public ``__module__``, so that reprs, pickles and API pages show the name that users import.
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
    """Make ``module`` the ``__module__`` of each class and function in ``values``."""
    for value in values:
        if isinstance(value, (type, FunctionType)):
            value.__module__ = module


def lazy(module: str, homes: Mapping[str, str], package: str = "") -> Getter:
    """Return a ``__getattr__`` for ``module`` that imports each name at first use.

    The package of an app needs this, because Django imports it before it can load models.

    :param homes: for each name, the module that defines it, relative to ``package``, by default to ``module``.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package or module}.{homes[name]}"), name)
        adopt(module, [value])
        return value

    return get
