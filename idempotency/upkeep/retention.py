"""The purge: delete records whose retention is over, one bounded batch at a time.

The database's clock decides whether a record is past retention. A claim is never purged, live or abandoned: an
abandoned claim has to be recovered first, because its row is all that is known about it. A parked record waits for
somebody to resolve it, unless the caller says otherwise.

If the process dies before the COMMIT of a batch, nothing was deleted. If it dies after the COMMIT, the batch is done.
Several purges may run at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from django.db import OperationalError, transaction

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
# A batch has locked many rows already when it waits for one. So it waits for less time than anybody who waits for it.
LOCK_TIMEOUT = timedelta(milliseconds=100)


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

    :param jobs: 1 to 64. So many batches run at the same time, each over a connection of its own. What is yielded is
        then the sum of their results. Only PostgreSQL can divide a table that is not in parts; elsewhere one job works.
    :raises ValueError: the number of jobs is not between 1 and 64.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    if not 1 <= jobs <= MAX_JOBS:
        raise ValueError(f"jobs must be between 1 and {MAX_JOBS}, not {jobs}.")
    using = using or alias()
    left = _Left(using)
    purge = partial(_purge_next, left, _statuses(include_parked), batch_size)
    with side_by_side(jobs) as run:
        while left:
            batches = run([purge] * jobs)
            if not left:
                note_end_of_purge(using)
            yield replace(sum(batches, PurgeResult()), exhausted=not left)


class _Left:
    """What is left to purge. Several jobs take from it, and no two of them the same."""

    def __init__(self, using: str) -> None:
        self.using = using
        #: Parts of the table, each with the time from which to go on.
        self._parts: deque[tuple[sql.Part, datetime | None]] = deque((part, None) for part in sql.store(using).parts())
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(self, limit: int) -> sql.DueRange | None:
        """Take what is due in the first part.

        If it is known where that ends, the rest is left for the next job. Otherwise, the job puts the rest back.
        """
        with self._lock:
            if not self._parts:
                return None
            part, after = self._parts.popleft()
            find = partial(sql.store(self.using).find_due, part, limit, after)
            due = sql.retry_lost_races(MAX_ROUNDS, self.using, find)
            if due.end is not None and not due.is_last:
                self.put_back(part, due.end)
            return due

    def put_back(self, part: sql.Part, after: datetime | None) -> None:
        self._parts.appendleft((part, after))


def _purge_next(left: _Left, statuses: Collection[Status], batch_size: int) -> PurgeResult:
    """Purge from the first part, and from the next ones as long as the batch has room.

    A part that is not exhausted may give less than there is room for, because records that are kept lie between those
    that are due. So the batch goes on in it only if it has nothing yet.
    """
    batch = PurgeResult()
    while batch.exhausted or not batch.deleted:
        limit = batch_size - batch.deleted
        due = left.take(limit)
        if due is None:
            break
        batch += (taken := _purge_range(left.using, statuses, due, limit))
        if due.end is None and not taken.exhausted:
            left.put_back(due.part, taken.reached)
    return batch


def _purge_range(using: str, statuses: Collection[Status], due: sql.DueRange, limit: int) -> PurgeResult:
    """Delete up to ``limit`` records. If another transaction holds one of them, delete the others."""
    store = sql.store(using)
    delete = partial(sql.retry_lost_races, MAX_ROUNDS, using)
    try:
        result = delete(lambda: _delete(store, statuses, due, limit))
    except OperationalError as error:
        if due.end is None or not store.timed_out_waiting(error):
            raise
        result = delete(lambda: _delete(store, statuses, replace(due, skips_locked=True), limit))
    if result.deleted:
        purged.send_robust(sender=IdempotencyRecord, count=result.deleted)
    return result


def _delete(store: sql.Store, statuses: Collection[Status], due: sql.DueRange, limit: int) -> PurgeResult:
    """Delete a batch in one transaction."""
    may_wait = due.end is not None and not due.skips_locked
    with transaction.atomic(using=store.using, durable=True):
        # COMMIT need not wait for the disk, because it is harmless to lose a batch in a crash of the server: the next
        # run deletes it again. A new claim of a purged key comes later in the same log, so it can't survive without the
        # deletion.
        store.bound_transaction(
            idle=IDLE_TIMEOUT,
            statement=STATEMENT_TIMEOUT,
            lock=LOCK_TIMEOUT if may_wait else None,
            wait_for_disk=False,
        )
        batch = store.delete_due(due, statuses, limit)
        fault_point("purge.selected")
    return PurgeResult(batch.deleted, batch.reached, exhausted=batch.exhausted)


def _statuses(include_parked: bool) -> frozenset[Status]:
    return PURGED | {Status.PARKED} if include_parked else PURGED
