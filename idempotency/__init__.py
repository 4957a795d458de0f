"""Make mutating API operations safe to retry.

``public`` lists the modules that users import from. Each name is imported at first use, because Django imports an
app's package before it can load models.

Imports run one way. From the bottom up: ``accounts``, ``conf``, ``exceptions``, ``lifecycle`` and ``options``;
``identity`` and ``operation``; ``encryption``; ``models``, ``outcome`` and ``signals``; ``store``, where a database is
added; ``protocol``; ``http``, ``operate`` and ``log``; ``testing``; ``admin``, ``checks``, ``management`` and
``templatetags``; ``outbox``; ``contrib``, where a framework is added; ``apps``. A project may add these apps:
``outbox``, ``contrib.dashboard``, ``contrib.celery``, ``contrib.prometheus`` and ``contrib.opentelemetry``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .public import Getter, lazy

if TYPE_CHECKING:
    from .conf import (
        is_recordable,
        is_recordable_unless_invalid,
    )
    from .identity.scope import Scope
    from .log import ClaimFilter
    from .operation import Operation
    from .options.table import DEFAULT_RECORDED_HEADERS
    from .options.values import (
        ACCEPTED,
        CONFLICT,
        PARK,
        REEXECUTE,
        Attach,
        Completed,
        Finding,
        NotExecuted,
        Reconcile,
        Unknown,
        Wait,
    )
    from .protocol.claim import Claim
    from .protocol.claim_block import Run, claim
    from .protocol.context import current_claim, require_claim
    from .protocol.locks import hold
    from .views.decorators import idempotent
    from .views.layers import checks_nothing
    from .views.view_classes import EVERY, IdempotentMixin

__version__ = "0.1.0"

__all__ = [
    "ACCEPTED",
    "CONFLICT",
    "DEFAULT_RECORDED_HEADERS",
    "EVERY",
    "PARK",
    "REEXECUTE",
    "Attach",
    "Claim",
    "ClaimFilter",
    "Completed",
    "Finding",
    "IdempotentMixin",
    "NotExecuted",
    "Operation",
    "Reconcile",
    "Run",
    "Scope",
    "Unknown",
    "Wait",
    "checks_nothing",
    "claim",
    "current_claim",
    "hold",
    "idempotent",
    "is_recordable",
    "is_recordable_unless_invalid",
    "require_claim",
]

__getattr__: Getter = lazy(
    __name__,
    dict.fromkeys(__all__, "options.values")
    | {name: "conf" for name in __all__ if name.startswith("is_recordable")}
    | {
        "Claim": "protocol.claim",
        "ClaimFilter": "log",
        "DEFAULT_RECORDED_HEADERS": "options.table",
        "EVERY": "views.view_classes",
        "IdempotentMixin": "views.view_classes",
        "Operation": "operation",
        "Run": "protocol.claim_block",
        "Scope": "identity.scope",
        "checks_nothing": "views.layers",
        "claim": "protocol.claim_block",
        "current_claim": "protocol.context",
        "hold": "protocol.locks",
        "idempotent": "views.decorators",
        "require_claim": "protocol.context",
    },
)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
