"""The claim that the running code belongs to.

Imports neither Django nor anything else of the package, so that a plain script which only uses an HTTP client of
``contrib`` can ask.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .claim import Claim

#: Set and reset by what runs code under a claim, and by nothing else.
claim_in_context: Final[ContextVar[Claim | None]] = ContextVar("idempotency_claim", default=None)


def current_claim() -> Claim | None:
    """The claim that the calling code runs under: the innermost one, or None outside of a protected operation."""
    return claim_in_context.get()


def require_claim() -> Claim:
    """The claim that the calling code runs under, for code that can't run without one.

    :raises RuntimeError: no protected operation is running here.
    """
    claim = claim_in_context.get()
    if claim is None:
        raise RuntimeError(
            "require_claim() was called outside of a protected operation. Call it within a handler that is protected "
            "for this request, or within a claim() block; use current_claim() where there may be none."
        )
    return claim
