"""Make mutating API operations safe to retry.

The names below are the public interface. Each is imported at first use: some need the models, and Django imports an
app's package before it can load models; and ``conformance`` runs where Django is not installed.

Imports run one way. From the bottom up: ``conf``, ``exceptions``, ``lifecycle`` and ``options``; ``identity`` and
``operation``; ``encryption``; ``models``, ``outcome`` and ``signals``; ``store``, where a database is added;
``protocol``; ``http``, ``operate`` and ``log``; ``testing``; ``admin``, ``checks``, ``management`` and
``templatetags``; ``outbox``; ``contrib``, where a framework is added; ``apps``. A project may add these apps:
``outbox``, ``contrib.dashboard``, ``contrib.celery``, ``contrib.prometheus`` and ``contrib.opentelemetry``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .http.decorators import idempotent
    from .http.layers import checks_nothing
    from .http.view_classes import EVERY, IdempotentMixin
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
    from .protocol.claim_block import claim
    from .protocol.context import current_claim, require_claim

__version__ = "0.1.0"

_MODULES = {
    "EVERY": "http.view_classes",
    "IdempotentMixin": "http.view_classes",
    "Operation": "operation",
    "checks_nothing": "http.layers",
    "claim": "protocol.claim_block",
    "current_claim": "protocol.context",
    "idempotent": "http.decorators",
    "require_claim": "protocol.context",
}

__all__ = [
    "ACCEPTED",
    "CONFLICT",
    "EVERY",
    "PARK",
    "REEXECUTE",
    "Attach",
    "Completed",
    "IdempotentMixin",
    "NotExecuted",
    "Operation",
    "Reconcile",
    "Unknown",
    "Wait",
    "checks_nothing",
    "claim",
    "current_claim",
    "idempotent",
    "require_claim",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'options.values')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
