"""Make mutating API operations safe to retry.

The names below are the public interface. Two of them are imported at first use, because they need the models, and
Django imports an app's package before it can load models.

Imports run one way, from the bottom up: ``conf``, ``exceptions``, ``lifecycle``, ``options``; ``identity`` and
``operation``; ``models``; ``sql``, where a database is added; ``protocol``; ``http`` and ``upkeep``; ``outbox``;
``contrib``, where a framework is added, ``admin`` and ``management``; ``tasks`` and ``apps``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .operation import Operation
from .options.values import (
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
from .protocol.context import current_claim, require_claim

if TYPE_CHECKING:
    from .http.decorators import idempotent
    from .protocol.block import claim

__version__ = "0.1.0"

_LAZY = {"claim": "protocol.block", "idempotent": "http.decorators"}

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
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
