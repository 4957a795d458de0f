"""``Ownership``: what an attempt knows of the record that it owns, or owned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..exceptions import IdempotencyError, LeaseLostError
from ..identity.scope import Scope
from ..operation import Operation
from ..sql import Fence


@dataclass
class Ownership:
    """One attempt's ownership of a record. The functions of the protocol take it; a handler sees it as a ``Claim``.

    ``attempt`` is the fencing number: every change that the attempt makes to its record names it, and matches nothing
    once another attempt has taken over.
    """

    operation: Operation
    scope: Scope
    record_id: int
    attempt: int
    request_hash: str = field(repr=False)
    using: str
    #: The attempt before this one disappeared, and what became of it must be found out before anything runs.
    abandoned: bool = False
    #: Another attempt is known to own the record.
    lost: bool = False
    #: True in a TestCase, whose transaction hides the record from every other connection.
    shares_connection: bool = False
    #: The operation may have committed writes that its record's transaction doesn't undo.
    has_effects_elsewhere: bool = False
    #: With a heartbeat: until when the lease is known to be this attempt's, by ``time.monotonic()``.
    held_until: float | None = None

    @property
    def fence(self) -> Fence:
        return Fence(self.scope, self.record_id, self.attempt, self.request_hash)

    @property
    def is_lost(self) -> bool:
        """Whether the record is known to be another attempt's, or no heartbeat has come through for so long that it may
        be. Asks nobody, so it costs nothing."""
        if self.held_until is not None and time.monotonic() >= self.held_until:
            self.lost = True
        return self.lost

    def ensure(self) -> None:
        """:raises LeaseLostError: the lease is known to be lost."""
        if self.is_lost:
            raise self.lost_error()

    def lost_error(self) -> LeaseLostError:
        error = LeaseLostError(
            f"Attempt {self.attempt} of operation {self.operation.name!r} outlived its lease of "
            f"{self.operation.lease.total_seconds():g} s and was taken over. Its writes are rolled back."
        )
        error.raised_by = self
        return error


@contextmanager
def on_behalf_of(owned: Ownership) -> Iterator[None]:
    """Say of the errors of the block whose they are: this attempt's, and not those of a claim within its handler."""
    try:
        yield
    except IdempotencyError as error:
        error.raised_by = owned
        raise
