"""Make mutating API operations safe to retry.

The names below are the public interface. They are resolved at first use, because an app's package is imported before
Django's models can be.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .http.decorators import idempotent
    from .operation import Operation
    from .policy import (
        ACCEPTED,
        CONFLICT,
        PARK,
        REEXECUTE,
        Attach,
        Completed,
        NotExecuted,
        Reconcile,
        Unknown,
        Wait,
    )
    from .protocol.block import claim
    from .protocol.context import current_claim, require_claim

__version__ = "0.1.0"

_HOMES = {
    "ACCEPTED": "policy",
    "Attach": "policy",
    "CONFLICT": "policy",
    "Completed": "policy",
    "NotExecuted": "policy",
    "Operation": "operation",
    "PARK": "policy",
    "REEXECUTE": "policy",
    "Reconcile": "policy",
    "Unknown": "policy",
    "Wait": "policy",
    "claim": "protocol.block",
    "current_claim": "protocol.context",
    "idempotent": "http.decorators",
    "require_claim": "protocol.context",
}

__all__ = [
    "ACCEPTED",
    "CONFLICT",
    "PARK",
    "REEXECUTE",
    "Attach",
    "Completed",
    "NotExecuted",
    "Operation",
    "Reconcile",
    "Unknown",
    "Wait",
    "claim",
    "current_claim",
    "idempotent",
    "require_claim",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
