"""The purge: delete records whose retention is over, one bounded batch at a time.

The database's clock decides whether a record is past retention. A claim is never purged, live or abandoned: an
abandoned claim has to be recovered first, because its row is all that is known about it. A parked record waits for
somebody to resolve it, unless the caller says otherwise.

If the process dies before the COMMIT of a batch, nothing was deleted. If it dies after the COMMIT, the batch is done.
Several purges may run at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeAlias

from django.db import transaction

from .. import sql
from ..lifecycle import Status
from ..models import IdempotencyRecord, RecordQuerySet
from ..protocol.faults import fault_point
from ..protocol.transactions import alias
from ..signals import purged
from .batches import BatchResult, check_batch_size, side_by_side
from .counters import note_end_of_purge

# A batch is one transaction. Claims of its keys wait for it, a standby replays it in one piece, and its work is lost if
# the process is killed. So it is small: five thousand rows take PostgreSQL 15 to 30 ms. Smaller batches take longer for
# each row.
DEFAULT_BATCH_SIZE: Final = 5000
# A larger batch would be no faster, and would hold its row locks for longer than a claim waits for a lock.
MAX_BATCH_SIZE: Final = 10_000

#: More connections than a server has cores bring nothing.
MAX_JOBS: Final = 64

PURGED: Final = frozenset({Status.COMPLETED, Status.RECOVERABLE})

# If the database refuses a batch because of another transaction, the batch is tried again, this often at most. Under
# REPEATABLE READ, one record that was claimed again after the batch's snapshot is enough for a refusal.
MAX_ROUNDS = 5

# If the process freezes before a COMMIT, the database ends the transaction after this time and frees the rows. Until
# then these keys can't be claimed again.
IDLE_TIMEOUT = timedelta(seconds=5)
# The database cancels a statement that runs for longer, for example because of a bad plan. The largest batch takes a
# second.
STATEMENT_TIMEOUT = timedelta(seconds=60)


#: Parts of the table, each with the time from which to go on.
_Left: TypeAlias = "deque[tuple[sql.Part, datetime | None]]"


@dataclass
class PurgeResult(BatchResult):
    """The result of one batch of a purge."""

    #: How many rows were deleted.
    deleted: int = 0
    #: When the last row of the batch became due, or None if the batch found no row. The next batch starts there.
    reached: datetime | None = None

    @property
    def touched(self) -> int:
        return self.deleted


def due(*, include_parked: bool = False, using: str | None = None) -> RecordQuerySet:
    """The records that a purge would delete now."""
    records: RecordQuerySet = RecordQuerySet(IdempotencyRecord, using=using or alias())
    return records.past_retention().filter(status__in=_statuses(include_parked))


def purge_once(
    *, batch_size: int = DEFAULT_BATCH_SIZE, include_parked: bool = False, using: str | None = None
) -> PurgeResult:
    """Delete up to ``batch_size`` records past retention, oldest first.

    :param batch_size: 1 to 10,000.
    :param include_parked: also delete parked records.
    :param using: a database alias; by default the one that records are written to.
    :raises ValueError: the batch size is not between 1 and 10,000.
    :raises DatabaseError: the database refuses. Nothing was deleted from the table or, if it is partitioned, from the
        partition that refused.
    """
    return next(purge_batches(batch_size=batch_size, include_parked=include_parked, using=using))


def purge_batches(
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    include_parked: bool = False,
    jobs: int = 1,
    using: str | None = None,
) -> Iterator[PurgeResult]:
    """Purge batch after batch until nothing more is due. The caller may stop between any two.

    A partitioned table is purged one partition after the other, in transactions of their own. In each, a batch starts
    where the one before it ended. If it started at the beginning, it would read again the index entries of all deleted
    records, which stay until a vacuum, and of all records that are kept, so each batch would cost more than the one
    before. Rows that another transaction has locked are skipped; the next run deletes them.

    Takes the arguments of ``purge_once``, and raises the same errors.

    :param jobs: 1 to 64. So many batches run at the same time, each on another partition and over a connection of its
        own. What is yielded is then the sum of their results.
    :raises ValueError: the number of jobs is not between 1 and 64.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    if not 1 <= jobs <= MAX_JOBS:
        raise ValueError(f"jobs must be between 1 and {MAX_JOBS}, not {jobs}.")
    using = using or alias()
    left: _Left = deque((part, None) for part in sql.store(using).parts())
    purge = partial(_purge_part, using, _statuses(include_parked))
    with side_by_side(jobs) as run:
        while left:
            batches = run([partial(_purge_next, left, purge, batch_size)] * jobs)
            if not left:
                note_end_of_purge(using)
            yield replace(sum(batches, PurgeResult()), exhausted=not left)


def _purge_next(left: _Left, purge: Callable[..., PurgeResult], batch_size: int) -> PurgeResult:
    """Purge from the first part, and from the next ones as long as the batch has room.

    A part that is not exhausted may give less than there is room for, because records that are kept lie between those
    that are due. So the batch goes on in it only if it has nothing yet.

    :param left: the parts that may have more, each with the time from which to go on. Other threads take from it, too.
    """
    batch = PurgeResult()
    with suppress(IndexError):  # no part is left
        while batch.exhausted or not batch.deleted:
            part, after = left.popleft()
            batch += (taken := purge(part, batch_size - batch.deleted, after))
            if not taken.exhausted:
                left.appendleft((part, taken.reached))
    return batch


def _purge_part(
    using: str, statuses: Collection[Status], part: sql.Part, limit: int, after: datetime | None
) -> PurgeResult:
    """Delete up to ``limit`` records of a part, in one transaction.

    :param after: skip records whose retention ended before this time.
    """
    store = sql.store(using)

    def transact() -> PurgeResult:
        with transaction.atomic(using=using, durable=True):
            store.bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT)
            batch = store.delete_due(part, statuses, limit, after)
            fault_point("purge.selected")
        return PurgeResult(batch.deleted, batch.reached, exhausted=batch.exhausted)

    result = sql.retry_lost_races(MAX_ROUNDS, using, transact)
    if result.deleted:
        purged.send_robust(sender=IdempotencyRecord, count=result.deleted)
    return result


def _statuses(include_parked: bool) -> frozenset[Status]:
    return PURGED | {Status.PARKED} if include_parked else PURGED
