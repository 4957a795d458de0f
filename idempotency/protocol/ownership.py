"""``Ownership``: what an attempt knows about the record that it owns or owned."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..exceptions import IdempotencyError, LeaseLostError
from ..identity.scope import Scope
from ..operation import Policy
from ..store import Fence, Store


@dataclass
class Ownership:
    """One attempt's ownership of a record. The functions of the protocol use it; a handler sees it as a ``Claim``.

    Every statement with which the attempt changes its record names its fence, and matches no row once another attempt
    has taken over.
    """

    policy: Policy
    fence: Fence
    #: Over the connection of the thread that claimed. Another thread has a store of its own: ``store_for(using)``.
    store: Store
    #: True if the earlier attempt disappeared and the reconciler must be asked before anything runs.
    abandoned: bool = False
    #: True if another attempt is known to own the record.
    lost: bool = False
    #: True in a TestCase, whose transaction hides the record from every other connection.
    shares_connection: bool = False
    #: True if the operation may have committed writes that a rollback of the record's transaction doesn't undo.
    has_effects_elsewhere: bool = False
    #: True if the operation answered with a status below 500 that it declares as no outcome. That is no failure.
    declined: bool = False
    #: With a heartbeat: the time until which the lease is known to be valid, by ``time.monotonic()``.
    held_until: float | None = None

    @property
    def using(self) -> str:
        return self.store.using

    @property
    def scope(self) -> Scope:
        return self.fence.scope

    @property
    def attempt(self) -> int:
        return self.fence.attempt

    @property
    def is_lost(self) -> bool:
        """Whether another attempt is known to own the record, or may own it because no renewal of the heartbeat has
        succeeded for a whole lease. Sends no query."""
        if self.held_until is not None and time.monotonic() >= self.held_until:
            self.lost = True
        return self.lost

    def ensure(self) -> None:
        """:raises LeaseLostError: the lease is known to be lost."""
        if self.is_lost:
            raise self.lost_error()

    def lost_error(self) -> LeaseLostError:
        error = LeaseLostError(
            f"Attempt {self.attempt} of operation {self.scope.operation!r} outlived its lease of "
            f"{self.policy.lease.total_seconds():g} s and was taken over. Its writes are rolled back."
        )
        error.raised_by = self
        return error


class on_behalf_of:  # noqa: N801 - used as a function is
    """Mark the block's errors as this attempt's own, so that they differ from those of another claim in its handler."""

    def __init__(self, owned: Ownership) -> None:
        self.owned = owned

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, IdempotencyError):
            error.raised_by = self.owned
