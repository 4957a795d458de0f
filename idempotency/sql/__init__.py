"""The statements on records, a module a database: ``postgresql`` in SQL, ``portable`` on the ORM for the others.

Each module offers the same functions. A boolean answer is "one row matched": the compare-and-set won.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar, cast

from django.db import OperationalError, connections

from ..lifecycle import Status
from ..outcome import Outcome
from ..scope import Scope

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Fence:
    """What a change of an owned record must still match."""

    scope: Scope
    id: int
    attempt: int
    request_hash: str


@dataclass(frozen=True)
class Row:
    """A record as a request that didn't win finds it. The database's clock has judged its times."""

    id: int
    attempt: int
    status: Status
    request_hash: str
    lease_left: float  # seconds; 0 or less when the lease is over, or there is none
    retention_over: bool
    outcome: Outcome | None  # of a completed record

    @property
    def lease_over(self) -> bool:
        return self.lease_left <= 0


class Backend(Protocol):
    def insert_claim(
        self, using: str, scope: Scope, request_hash: str, *, lease: timedelta, ttl: timedelta, wait_for_disk: bool
    ) -> int | None: ...

    def read(self, using: str, scope: Scope) -> Row | None: ...

    def bound_transaction(self, using: str, *, idle: timedelta, statement: timedelta) -> None:
        """Let the database end the session if the open transaction stays idle for that long, and any statement in it
        that takes longer than ``statement``, where it can."""
        ...

    def take_over(self, using: str, scope: Scope, row: Row, lease: timedelta) -> bool: ...

    def start_over(
        self, using: str, scope: Scope, row: Row, request_hash: str, *, lease: timedelta, ttl: timedelta
    ) -> bool: ...

    def set_lease(self, using: str, fence: Fence, duration: timedelta) -> bool: ...

    def park_abandoned(self, using: str, scope: Scope, row: Row) -> bool: ...

    def complete(self, using: str, fence: Fence, outcome: Outcome) -> bool: ...

    def release(self, using: str, fence: Fence) -> bool: ...

    def park(self, using: str, fence: Fence) -> bool: ...

    def lost_a_race(self, error: OperationalError) -> bool:
        """The transaction was refused because of another one; the same again may succeed."""
        ...

    def timed_out_waiting(self, error: OperationalError) -> bool:
        """Another transaction holds the row's lock."""
        ...

    def was_broken_before(self, error: BaseException) -> bool:
        """The statement was ignored because an earlier one had failed in its transaction."""
        ...

    def commit_was_refused(self, error: BaseException) -> bool:
        """The database itself said that it rolled back. Any other error out of COMMIT may hide a commit."""
        ...


_by_vendor: dict[str, Backend] = {}


def backend(using: str) -> Backend:
    vendor = connections[using].vendor
    known = _by_vendor.get(vendor)
    if known is None:
        from . import portable, postgresql  # these import the types above

        known = _by_vendor[vendor] = cast("Backend", postgresql if vendor == "postgresql" else portable)
    return known


def retry_lost_races(rounds: int, using: str, transact: Callable[[], _Result]) -> _Result:
    """What ``transact`` returns, run again if it lost a race, up to so many times in all."""
    while True:
        try:
            return transact()
        except OperationalError as error:
            rounds -= 1
            if not rounds or not backend(using).lost_a_race(error):
                raise
