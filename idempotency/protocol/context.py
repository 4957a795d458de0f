"""The claim that the running code belongs to.

Imports neither Django nor anything else of the package, so that a plain script which only uses an HTTP client of
``contrib`` can ask.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .claims import Claim

#: Set and reset by what runs code under a claim, and by nothing else.
claim_in_context: Final[ContextVar[Claim | None]] = ContextVar("idempotency_claim", default=None)


def current_claim() -> Claim | None:
    """The claim that the calling code runs under: the innermost one, or None outside of a protected operation."""
    return claim_in_context.get()
