"""Work in bounded batches: the result of a batch, its transaction, and a loop over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Self, TypeVar

from django.db import transaction

from ..store import Upkeep, retry_lost_races, upkeep_for

_Result = TypeVar("_Result", bound="BatchResult")
_Outcome = TypeVar("_Outcome")

#: If the process freezes before a COMMIT, the database ends the transaction after this time and frees its rows.
#: Normally a batch is idle for milliseconds.
IDLE_TIMEOUT: Final = timedelta(seconds=5)
#: Cancels a statement that takes far too long, for example because of a bad plan. The largest batch takes a second.
STATEMENT_TIMEOUT: Final = timedelta(seconds=60)
#: The maximum number of tries for a batch that the database refuses because of another transaction. Under REPEATABLE
#: READ, a single record claimed again after the batch's snapshot causes a refusal.
MAX_ROUNDS: Final = 5


@dataclass
class BatchResult:
    """The result of one batch, as counts of rows. The sum of results is the result of all their batches."""

    #: Whether the batch found fewer rows than its limit: nothing more is due, or other processes hold the rest.
    exhausted: bool = field(default=True, kw_only=True)

    @property
    def touched(self) -> int:
        """The number of changed rows."""
        raise NotImplementedError

    def __add__(self, later: Self) -> Self:
        """Add a later batch. Counts are added and mappings merged; the later batch decides whether more is due."""
        sums: dict[str, Any] = {}
        for name, theirs in vars(later).items():
            ours = getattr(self, name)
            sums[name] = ours | theirs if isinstance(ours, dict) else ours + theirs
        return type(self)(**{**sums, "exhausted": later.exhausted})

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}


def in_batches(take: Callable[[], _Result]) -> Iterator[_Result]:
    """Take batches until nothing more is due."""
    is_exhausted = False
    while not is_exhausted:
        batch = take()
        yield batch
        is_exhausted = batch.exhausted


def in_transaction(
    using: str,
    work: Callable[[Upkeep], _Outcome],
    *,
    statement_timeout: timedelta = STATEMENT_TIMEOUT,
    wait_for_disk: bool = True,
) -> _Outcome:
    """Do the work of one batch in a short transaction. Repeats it up to ``MAX_ROUNDS`` times if it loses a race.

    :param wait_for_disk: False if the batch may be lost in a crash of the server.
    :raises RuntimeError: a transaction is open.
    """

    def transact() -> _Outcome:
        upkeep = upkeep_for(using)
        with transaction.atomic(using=using, durable=True):
            upkeep.bound_transaction(idle=IDLE_TIMEOUT, statement=statement_timeout, wait_for_disk=wait_for_disk)
            return work(upkeep)

    return retry_lost_races(MAX_ROUNDS, using, transact)


def check_batch_size(batch_size: int, largest: int) -> None:
    """:raises ValueError: the batch size is not between 1 and ``largest``."""
    if not 1 <= batch_size <= largest:
        raise ValueError(f"batch_size must be between 1 and {largest}, not {batch_size}.")
