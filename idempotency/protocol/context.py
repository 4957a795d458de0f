"""The claim of the code that is running.

This module imports neither Django nor the rest of the package, because scripts that only use an HTTP client from
``contrib`` import it, too.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .claim import Claim

#: Only ``execution.running`` sets and resets this.
claim_in_context: Final[ContextVar[Claim | None]] = ContextVar("idempotency_claim", default=None)


def current_claim() -> Claim | None:
    """The innermost claim of the calling code, or None outside of a protected operation and after its end."""
    claim = claim_in_context.get()
    while claim is not None and not claim.is_running:
        claim = claim.outer
    return claim


def require_claim() -> Claim:
    """The innermost claim of the calling code, for code that can't run without one.

    :raises RuntimeError: no protected operation is running here.
    """
    claim = current_claim()
    if claim is None:
        raise RuntimeError(
            "require_claim() was called outside of a protected operation. Call it within a handler that is protected "
            "for this request, or within a claim() block; use current_claim() where there may be none."
        )
    return claim
