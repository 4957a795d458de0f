"""Bring a record into a state that a test starts from.

Each function takes a record or the key of a request that was sent, and returns the record in its new state. The payload
and the account stay the same, so the retry of the same request finds the record. The times are the database's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from django.db.models import DateTimeField, ExpressionWrapper, Value
from django.db.models.functions import Now
from django.http import HttpResponse

from .. import sql
from ..identity.keys import shorten
from ..lifecycle import Status
from ..models import IdempotencyRecord, RecordQuerySet
from ..operation import Operation, registry
from ..outcome import outcome_of
from ..protocol.transactions import alias, own_transaction
from ..sql import Fence
from ..upkeep.bodies import purge_body_batches

#: So much in the past is certainly over, even on a database whose clock has whole seconds only.
A_WHILE = timedelta(seconds=2)


def in_progress(record: IdempotencyRecord | str) -> IdempotencyRecord:
    """Let another attempt own the record: a claim whose lease is running. A retry is told to wait.

    :param record: a record, or the key of one.
    :returns: the record as it is now.
    :raises LookupError: there is no such record, or several records have the key, or no operation of its name is
        declared in this process.
    """
    found = _find(record)
    operation = _operation_of(found)
    if found.status != Status.IN_PROGRESS:
        _end_retention(found)  # because only a record past its retention can be claimed in any state
        _start_over(found, operation)
    return _set_lease(found, operation, operation.lease)


def abandoned(record: IdempotencyRecord | str) -> IdempotencyRecord:
    """Let the attempt that owns the record have disappeared: a claim whose lease is over. A retry recovers it.

    Parameter, result and errors are those of ``in_progress``.
    """
    found = in_progress(record)
    return _set_lease(found, _operation_of(found), -A_WHILE)


def completed(record: IdempotencyRecord | str, response: HttpResponse) -> IdempotencyRecord:
    """Let another attempt have completed the record with a response. A retry gets this response.

    The other parameter, the result and the errors are those of ``in_progress``.

    :param response: the recorded response, with rendered content.
    :raises UnrecordableResponseError: the operation can't record the response.
    """
    found = in_progress(record)
    operation = _operation_of(found)
    with _own_transaction():
        sql.store(alias()).complete(
            _fence(found), outcome_of(response, operation), ttl=operation.ttl, body_ttl=operation.body_ttl
        )
    return _find(found)


def body_gone(record: IdempotencyRecord | str) -> IdempotencyRecord:
    """Let a purge have deleted the recorded response of a completed record, as it does after ``body_ttl``.

    :param record: a record, or the key of one.
    :returns: the record as it is now.
    :raises LookupError: there is no such record, or several records have the key.
    :raises ValueError: the record is not completed, so it has no response.
    """
    found = _find(record)
    if not _row(found).completed().update(body_expires_at=_a_while_ago()):
        raise ValueError(f"The record is {found.status.replace('_', ' ')}, so it has no recorded response.")
    for _ in purge_body_batches(using=alias()):
        pass
    return _find(found)


def expired(record: IdempotencyRecord | str) -> IdempotencyRecord:
    """Let the retention of the record be over, and the lease of a claim, too. The same key makes a new request.

    :param record: a record, or the key of one.
    :returns: the record as it is now.
    :raises LookupError: there is no such record, or several records have the key.
    """
    found = _find(record)
    _end_retention(found)
    return _find(found)


def _find(record: IdempotencyRecord | str) -> IdempotencyRecord:
    if isinstance(record, IdempotencyRecord):
        return _row(record).get()
    found = list(IdempotencyRecord.objects.using(alias()).filter(idempotency_key=record)[:2])
    if len(found) != 1:
        raise LookupError(
            f"{'Several records have' if found else 'No record has'} the key {shorten(record)}. "
            f"{'Pass one of the records' if found else 'Send the request to a protected view first'}."
        )
    return found[0]


def _row(record: IdempotencyRecord) -> RecordQuerySet:
    return RecordQuerySet(IdempotencyRecord, using=alias()).filter(pk=record.pk, account_id=record.account_id)


def _operation_of(record: IdempotencyRecord) -> Operation:
    operation = registry.get(record.operation)
    if operation is None:
        raise LookupError(f"No operation {record.operation!r} is declared in this process, so its lease is not known.")
    return operation


def _end_retention(record: IdempotencyRecord) -> None:
    _row(record).update(expires_at=_a_while_ago())
    _row(record).in_progress().update(lease_expires_at=_a_while_ago())


def _a_while_ago() -> ExpressionWrapper[Any]:
    return ExpressionWrapper(Now() - Value(A_WHILE), output_field=DateTimeField())


def _start_over(record: IdempotencyRecord, operation: Operation) -> None:
    store = sql.store(alias())
    row = store.read(record.scope)
    assert row is not None  # it was found a moment ago, and a test has no purge beside it
    with _own_transaction():
        store.start_over(record.scope, row, row.request_hash, lease=operation.lease, ttl=operation.ttl)


def _set_lease(record: IdempotencyRecord, operation: Operation, duration: timedelta) -> IdempotencyRecord:
    now = _find(record)
    with _own_transaction():
        sql.store(alias()).set_lease(_fence(now), duration, ttl=operation.ttl)
    return _find(now)


def _fence(record: IdempotencyRecord) -> Fence:
    return Fence(record.scope, record.pk, record.attempt, record.request_hash)


def _own_transaction() -> AbstractContextManager[None]:
    return own_transaction(alias(), "A helper of idempotency.testing")
