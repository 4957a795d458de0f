"""The purge: delete records, recorded responses and sent messages past their retention, one bounded batch at a time.

A batch is one transaction: it locks the oldest rows that are due and free, deletes them, and commits. The database's
clock decides which rows are due. If the process dies before the COMMIT, nothing was deleted. Several purges share the
rows, and leave out those that other transactions have locked.

A claim is never purged, live or abandoned: an abandoned claim has to be recovered first, because its row is all that
is known about it. A parked record waits for a decision. If an operation keeps its responses for a shorter time than its
records (``body_retention``), the record stays when its response is deleted, so that the key is still recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db.models import QuerySet
from django.db.models.functions import Now

from ..extensions import extensions
from ..lifecycle import Status
from ..models import IdempotencyRecord, RecordQuerySet
from ..protocol.faults import fault_point
from ..signals import purged
from ..store import Store, Taken, records_database
from .batches import BatchResult, check_batch_size, in_batches, in_transaction

# Claims of a batch's keys wait for it, a standby replays it in one piece, and its work is lost if the process is
# killed. So it is small: five thousand rows take PostgreSQL 20 to 40 ms. Smaller batches take longer for each row.
DEFAULT_BATCH_SIZE: Final = 5000
# A larger batch would be no faster, and would hold its row locks for longer than a claim waits for a lock.
MAX_BATCH_SIZE: Final = 10_000

PURGED: Final = frozenset({Status.COMPLETED, Status.RECOVERABLE})


@dataclass
class PurgeResult(BatchResult):
    """The result of one batch of a purge."""

    #: How many rows were deleted or, if responses are purged, changed.
    deleted: int = 0
    #: When the last row of the batch became due, or None if the batch found no row. The next batch starts there.
    reached: datetime | None = None

    @property
    def touched(self) -> int:
        return self.deleted


def due(*, include_parked: bool = False, using: str | None = None) -> RecordQuerySet:
    """The records that a purge would delete now."""
    records = RecordQuerySet(IdempotencyRecord, using=using or records_database())
    return records.past_retention().filter(status__in=_statuses(include_parked))


def purge_once(
    *, batch_size: int = DEFAULT_BATCH_SIZE, include_parked: bool = False, using: str | None = None
) -> PurgeResult:
    """Delete up to ``batch_size`` records past retention, oldest first.

    :param batch_size: 1 to 10,000.
    :param include_parked: also delete parked records.
    :raises ValueError: the batch size is not between 1 and 10,000.
    :raises RuntimeError: there is an open transaction.
    """
    return next(purge_batches(batch_size=batch_size, include_parked=include_parked, using=using))


def purge_batches(
    *, batch_size: int = DEFAULT_BATCH_SIZE, include_parked: bool = False, using: str | None = None
) -> Iterator[PurgeResult]:
    """Purge records batch after batch until nothing more is due. The caller may stop between any two.

    Takes the arguments of ``purge_once``, and raises the same errors.
    """
    using = using or records_database()
    statuses = _statuses(include_parked)
    batches = purge_oldest(using, batch_size, lambda store, after: store.delete_records(statuses, batch_size, after))
    for batch in batches:
        if batch.deleted:
            purged.send_robust(sender=IdempotencyRecord, count=batch.deleted)
        if batch.exhausted:
            for each in extensions():
                if each.after_purge:
                    each.after_purge(using)
        yield batch


def bodies_past_retention(using: str | None = None) -> RecordQuerySet:
    """The records whose response a purge would delete now."""
    return RecordQuerySet(IdempotencyRecord, using=using or records_database()).with_body_past_retention()


def purge_body_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[PurgeResult]:
    """Purge recorded responses batch after batch, as ``purge_batches`` does records."""
    return purge_oldest(
        using or records_database(), batch_size, lambda store, after: store.delete_bodies(batch_size, after)
    )


def purge_oldest(
    using: str, batch_size: int, delete: Callable[[Store, datetime | None], Taken]
) -> Iterator[PurgeResult]:
    """Purge batch after batch.

    A batch starts where the one before it ended. If it started at the beginning, it would read again the index entries
    of all deleted rows, which stay until a vacuum, and of all rows that are kept, so each batch would cost more than
    the one before.

    :param delete: deletes the oldest rows that became due at a time or later.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)

    def take(before: PurgeResult | None) -> PurgeResult:
        def work(store: Store) -> Taken:
            taken = delete(store, None if before is None else before.reached)
            fault_point["purge.selected"]()
            return taken

        # COMMIT need not wait for the disk, because it is harmless to lose a batch in a crash of the server: the next
        # run deletes it again. A new claim of a purged key comes later in the same log, so it can't survive without the
        # deletion.
        taken = in_transaction(using, work, wait_for_disk=False)
        return PurgeResult(taken.changed, taken.reached, exhausted=taken.found < batch_size)

    return in_batches(take)


def _statuses(include_parked: bool) -> frozenset[Status]:
    return PURGED | {Status.PARKED} if include_parked else PURGED


@dataclass(frozen=True)
class OtherPurge:
    """The purge of other rows than records. It runs after that of records."""

    #: The name of its count in a result, and what one row is called.
    name: str
    row: str
    #: Returns the rows that are due in a database.
    due: Callable[[str], QuerySet[Any]]
    #: Purges them, with the arguments of ``purge_body_batches``.
    batches: Callable[..., Iterator[PurgeResult]]


def _bodies_of_kept_records(using: str) -> RecordQuerySet:
    return bodies_past_retention(using).filter(expires_at__gt=Now())  # other records are purged with their response


_BODIES: Final = OtherPurge("bodies", "recorded response", _bodies_of_kept_records, purge_body_batches)


def other_purges() -> list[OtherPurge]:
    """The purges of other rows than records, in the order in which they run."""
    return [_BODIES, *(purge for each in extensions() for purge in each.purges)]
