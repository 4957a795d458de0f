"""The sweep: settle abandoned claims as their operations declare, in bounded batches, even if no client retries.

A sweep may be killed at any point and repeated: its changes are fenced, and it finds the remaining claims again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from django.db.models import Q

from .. import signals
from ..exceptions import IdempotencyError, InProgressError, OutcomeUnknownError
from ..lifecycle import Recovery, Status
from ..models import ABANDONED, IdempotencyRecord, RecordQuerySet
from ..operation import Operation, registry
from ..protocol import ownership
from ..protocol.decisions import take_over_abandoned
from ..protocol.faults import fault_point
from ..protocol.recovery import announce_recovery, reconcile
from ..store import Fence, Upkeep, by_ids, records_database, store_for
from ..store.history import Appended
from .batches import BatchResult, check_batch_size, in_transaction

logger: Final = logging.getLogger("idempotency")

#: Small, because a batch's reconcilers run one by one, and each may call a provider. Without reconcilers, a hundred
#: claims take milliseconds.
DEFAULT_BATCH_SIZE = 100
MAX_BATCH_SIZE = 10_000
#: Counting abandoned claims stops here.
MAX_LISTED = 10_000

_SETTLED_AS = {Recovery.REEXECUTE: Status.RECOVERABLE, Recovery.PARK: Status.PARKED}


@dataclass
class RecoveryResult(BatchResult):
    """The result of one batch of a sweep, as counts of records."""

    #: Became recoverable: the next retry runs the operation.
    recoverable: int = 0
    #: Completed by a reconciler.
    completed: int = 0
    #: Parked, because it is unknown whether the operation took effect.
    parked: int = 0
    #: Their reconciler could not decide yet and is called again later.
    postponed: int = 0
    #: Skipped, because no operation of that name is declared in this process. Counted in the first batch, among the
    #: ``MAX_LISTED`` claims abandoned longest.
    unknown_operations: Counter[str] = field(default_factory=Counter)

    @property
    def settled(self) -> int:
        return self.recoverable + self.completed + self.parked

    @property
    def touched(self) -> int:
        return self.settled + self.postponed


def abandoned(using: str | None = None) -> RecordQuerySet:
    """Claims whose lease is over, oldest lease first. Served by the partial index of unfinished records."""
    records = RecordQuerySet(IdempotencyRecord, using=using or records_database())
    return records.abandoned().order_by("lease_expires_at")


def recover_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[RecoveryResult]:
    """Settle abandoned claims, longest abandoned first, until nothing more is due. The caller may stop between batches.

    Sweeps may run concurrently, and a sweep may be killed. Rows locked by another sweep are skipped. Each change is
    conditional on the attempt or the lease on which it was decided. A reconciler runs without a lock or a transaction.

    :param batch_size: the maximum number of claims per batch, 1 to 10,000.
    :raises ValueError: the batch size is not between 1 and 10,000.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using = using or records_database()
    # A batch starts at the lease where the one before it ended. What is left before it is skipped or locked.
    after: datetime | None = None
    result = RecoveryResult(exhausted=False)
    while not result.exhausted:
        operations = {operation.name: operation for operation in registry}
        result = RecoveryResult()
        batch = _settle_at_once(using, operations, batch_size, after, result)
        for row in batch:
            after = row.lease_expires_at
            if operations[row.operation].recovery is Recovery.RECONCILE:
                _reconcile(using, operations[row.operation], row, result)
        result.exhausted = len(batch) < batch_size
        for name, count in result.unknown_operations.items():
            logger.warning(
                "%d abandoned claim(s) of operation %r were skipped: the operation is not declared in this process. "
                "Declare it in an app's operations.py, or import the module of its task.",
                count,
                name,
            )
        yield result


def _look_ahead(using: str, operations: Mapping[str, Operation]) -> tuple[datetime | None, Counter[str]]:
    """Read the abandoned claims once, so that a process which declares none of their operations reads no more.

    :returns: the lease of the first claim that this process may settle, or None, and how many it may not settle, by
        operation. If there are too many to list, it may be the lease of the last one listed.
    """
    listed = list(abandoned(using).values_list("operation", "lease_expires_at")[:MAX_LISTED])
    leases = (lease for name, lease in listed if name in operations)
    first = next(leases, listed[-1][1] if len(listed) == MAX_LISTED else None)
    return first, Counter(name for name, _lease in listed if name not in operations)


def _settle_at_once(
    using: str, operations: Mapping[str, Operation], limit: int, after: datetime | None, result: RecoveryResult
) -> list[IdempotencyRecord]:
    """Find a batch, settle its claims that need no reconciler, and return the whole batch.

    :param after: skip claims whose lease ended before this time; None starts with the oldest.

    If the process dies before the COMMIT, nothing was changed. If it freezes before the COMMIT, the rows stay locked
    until the database ends the session, and other sweeps skip them.
    """

    def settle(upkeep: Upkeep) -> tuple[list[IdempotencyRecord], dict[Status, list[IdempotencyRecord]]]:
        upkeep.end_leases_of_gone_sessions(operations, limit)
        first = after
        if first is None:
            first, result.unknown_operations = _look_ahead(using, operations)
        batch: list[IdempotencyRecord] = []
        if first is not None:
            due = ABANDONED & Q(operation__in=sorted(operations), lease_expires_at__gte=first)
            oldest = IdempotencyRecord.objects.using(using).order_by("lease_expires_at")
            # A locked row is being taken over, renewed or completed.
            batch = upkeep.select_unlocked(oldest, limit, condition=due)
        fault_point["sweep.selected"]()
        recoveries = {row.pk: operations[row.operation].recovery for row in batch}
        return batch, {
            status: settle_as(status, [row for row in batch if recoveries[row.pk] is recovery], using)
            for recovery, status in _SETTLED_AS.items()
        }

    batch, settled = in_transaction(using, settle)
    result.parked += len(settled[Status.PARKED])
    result.recoverable += len(settled[Status.RECOVERABLE])
    for status, rows in settled.items():
        for row in rows:
            event = operations[row.operation], row.scope, row.attempt
            if status is Status.PARKED:
                signals.send(signals.parked, *event)
            signals.send(signals.recovered, *event, status=str(status))
    return batch


def settle_as(status: Status, rows: list[IdempotencyRecord], using: str) -> list[IdempotencyRecord]:
    """:returns: the changed rows."""
    pks = [row.pk for row in rows]
    records = IdempotencyRecord.objects.using(using)
    # The update repeats the conditions: on a database without row locks, a claim may have been taken over since.
    due = records.filter(by_ids(pks, ABANDONED))
    if due.update(status=status, lease_expires_at=None, history=Appended("lease_over")) == len(rows):
        return rows
    changed = records.filter(by_ids(pks, Q(status=status)))
    attempts = set(changed.values_list("pk", "attempt"))
    return [row for row in rows if (row.pk, row.attempt) in attempts]


def _reconcile(using: str, operation: Operation, row: IdempotencyRecord, result: RecoveryResult) -> None:
    claim = take_over_abandoned(operation.policy, Fence.of(row), store_for(using))
    if claim is None:
        return  # another sweep or a retry came first
    try:
        if reconcile(claim) is not None:
            result.completed += 1
        elif ownership.release(claim):
            result.recoverable += 1
            announce_recovery(claim, Status.RECOVERABLE)
    except OutcomeUnknownError:
        result.parked += 1
    except InProgressError:
        result.postponed += 1
    except IdempotencyError:
        logger.exception("The result of the reconciler of %s could not be recorded", claim.scope)
        result.postponed += 1
