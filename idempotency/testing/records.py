"""Puts a record into the state that a test starts from.

Each function takes a record, or the key of a request that was sent, and returns the record in its new state. Its
payload and account stay the same, so a retry of the request finds it. Times are from the database's clock.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta

from django.db.models import DateTimeField, ExpressionWrapper, Value
from django.http import HttpResponse

from ..identity.keys import shorten
from ..lifecycle import Status
from ..models import IdempotencyRecord, Now, RecordQuerySet
from ..operation import Operation, registry
from ..outcome import outcome_of
from ..store import Fence, records_database, store_for

#: Long enough ago on every database, because some clocks have whole seconds.
A_WHILE = timedelta(seconds=2)


def in_progress(record: IdempotencyRecord | str) -> IdempotencyRecord:
    """Make another attempt own the record, with a running lease. A retry has to wait.

    :raises LookupError: no record or several records have the key, or this process doesn't know the operation.
    """
    current = _find(record)
    operation = _operation_of(current)
    if current.status != Status.IN_PROGRESS:
        _row(current).parked().update(status=Status.RECOVERABLE)  # as an operator decides
        current = expired(current)  # because a settled record can be claimed in any state past its retention
        with _own_transaction():
            store_for(records_database()).start_over(
                Fence.of(current),
                current.request_hash,
                lease=operation.policy.lease,
                retention=operation.policy.retention,
                undone_by_crash=False,
            )
    return _set_lease(current, operation, operation.policy.lease)


def abandoned(record: IdempotencyRecord | str) -> IdempotencyRecord:
    """Make the owning attempt look abandoned, with its lease over. A retry recovers it.

    Raises the errors of ``in_progress``.
    """
    current = in_progress(record)
    return _set_lease(current, _operation_of(current), -A_WHILE)


def completed(record: IdempotencyRecord | str, response: HttpResponse) -> IdempotencyRecord:
    """Complete the record as another attempt. A retry gets the response. Raises the errors of ``in_progress``.

    :param response: the response to record, rendered.
    :raises UnrecordableResponseError: the operation can't record the response.
    """
    current = in_progress(record)
    operation = _operation_of(current)
    with _own_transaction():
        store_for(records_database()).complete(
            Fence.of(current), outcome_of(response, operation.policy), retention=operation.policy.retention
        )
    return _find(current)


def expired(record: IdempotencyRecord | str) -> IdempotencyRecord:
    """End the record's retention, and the lease of a claim. The same key then makes a new request, unless the outcome
    is unknown: the record is parked, or the claim must be reconciled or parked.

    :raises LookupError: no record or several records have the key.
    """
    current, a_while_ago = _find(record), ExpressionWrapper(Now() - Value(A_WHILE), output_field=DateTimeField())
    _row(current).update(expires_at=a_while_ago)
    _row(current).in_progress().update(lease_expires_at=a_while_ago)
    return _find(current)


def _find(record: IdempotencyRecord | str) -> IdempotencyRecord:
    if isinstance(record, IdempotencyRecord):
        return _row(record).get()
    records = list(IdempotencyRecord.objects.using(records_database()).filter(idempotency_key=record)[:2])
    if len(records) != 1:
        raise LookupError(
            f"{'Several records have' if records else 'No record has'} the key {shorten(record)}. "
            f"{'Pass one of the records' if records else 'Send the request to a protected view first'}."
        )
    return records[0]


def _row(record: IdempotencyRecord) -> RecordQuerySet:
    return RecordQuerySet(IdempotencyRecord, using=records_database()).filter(
        pk=record.pk, account_id=record.account_id
    )


def _operation_of(record: IdempotencyRecord) -> Operation:
    operation = registry.get(record.operation)
    if operation is None:
        raise LookupError(f"No operation {record.operation!r} is declared in this process, so its lease is unknown.")
    return operation


def _set_lease(record: IdempotencyRecord, operation: Operation, duration: timedelta) -> IdempotencyRecord:
    now = _find(record)
    with _own_transaction():
        store_for(records_database()).set_lease(Fence.of(now), duration, retention=operation.policy.retention)
    return _find(now)


def _own_transaction() -> AbstractContextManager[None]:
    return store_for(records_database()).own_transaction("A helper of idempotency.testing")
