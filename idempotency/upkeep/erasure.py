"""Erasure: delete an account's traces from this app's tables, for example when a person asks for it.

The traces are the account's records with their steps, its messages in the outbox, and what consumers recorded and
published under a name of their own when they consumed those messages.

- Finished records and sent messages are erased.
- Live claims and messages that are still to be sent are never erased, because without its row such an operation could
  take effect twice or not at all.
- Abandoned claims, parked records and dead messages wait for somebody. They are erased only if the caller says so.

An erased record protects nothing any more: a retry or a delivery that comes later runs. So close the account first.

The entries of the admin's log and the counters do not contain the account. An erasure may be killed at any point and
run again: the account's own records lead to all other traces, so they are erased last.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from django.db import router, transaction
from django.db.models import Max, Min, Q, QuerySet
from django.db.models.functions import Now

from .. import sql
from ..identity.scope import Scope
from ..lifecycle import Status
from ..models import IdempotencyRecord, IdempotencyStep, MessageStatus, OutboxMessage
from ..protocol.transactions import alias
from . import audit
from .batches import BatchResult, check_batch_size

DEFAULT_BATCH_SIZE: Final = 500
#: A statement has one parameter for each row of a batch, and SQLite may accept no more than 999 parameters.
MAX_BATCH_SIZE: Final = 500

#: The outbox has no index on accounts, because every message would have to pay for it. An erasure reads the whole
#: outbox once, in windows of this many ids.
WINDOW: Final = 10_000
#: The number of key prefixes that one statement searches for.
PREFIXES: Final = 50

#: If the process freezes before a COMMIT, the database ends the transaction after this time and frees its rows.
IDLE_TIMEOUT: Final = timedelta(seconds=5)
#: The database cancels a statement that runs for longer.
STATEMENT_TIMEOUT: Final = timedelta(seconds=60)
_MAX_ROUNDS = 5

#: Each callable returns the names under which consumers record, as pairs of an account and an operation. An integration
#: adds a callable of its own.
consumer_finders: list[Callable[[], Iterable[tuple[str, str]]]] = []

_LIVE = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
_RECORDS: Final = {
    "live": _LIVE,
    "abandoned": Q(status=Status.IN_PROGRESS) & ~_LIVE,
    "parked": Q(status=Status.PARKED),
    "finished": Q(status__in=[Status.COMPLETED, Status.RECOVERABLE]),
}
#: What is always erased, in the names of ``AccountTraces.count``.
ERASED: Final = frozenset({"finished", "sent"})
#: What is erased as well with ``include_unresolved``.
UNRESOLVED: Final = frozenset({"abandoned", "parked", "dead"})
_MESSAGES: Final = {
    "pending": Q(status=MessageStatus.PENDING),
    "dead": Q(status=MessageStatus.DEAD),
    "sent": Q(status=MessageStatus.SENT),
}


@dataclass
class ErasureResult(BatchResult):
    """What one batch has erased, as counts of rows."""

    #: The steps of a record are erased with it and are not counted.
    records: int = 0
    messages: int = 0

    @property
    def touched(self) -> int:
        return self.records + self.messages


@dataclass
class AccountTraces:
    """The traces of an account, as ids of rows. They are searched for once: rows that are written later are missing."""

    account_id: str
    records_db: str
    messages_db: str
    #: The ids of records for each ``account_id`` that the records have: the account's own, or the name of a consumer.
    records: dict[str, list[int]] = field(default_factory=dict)
    #: The ids of messages.
    messages: list[int] = field(default_factory=list)

    def count(self) -> dict[str, int]:
        """Count the traces that exist now, by their state.

        :returns: the number of ``live``, ``abandoned``, ``parked`` and ``finished`` records and of ``pending``,
            ``dead`` and ``sent`` messages. Names whose count is 0 are left out.
        """
        counts = dict.fromkeys([*_RECORDS, *_MESSAGES], 0)
        for account_id, ids in self.records.items():
            for chunk in _chunks(ids):
                found = _records(self.records_db, account_id, chunk)
                for name, condition in _RECORDS.items():
                    counts[name] += found.filter(condition).count()
        for chunk in _chunks(self.messages):
            messages = OutboxMessage.objects.using(self.messages_db).filter(pk__in=chunk)
            for name, condition in _MESSAGES.items():
                counts[name] += messages.filter(condition).count()
        return {name: count for name, count in counts.items() if count}


def find_traces(account_id: str, *, using: str | None = None) -> AccountTraces:
    """Find the traces of an account. Reads the whole outbox once, and the account's own records.

    :param using: a database alias; by default those that records and messages are written to.
    :returns: the ids of the rows.
    :raises ValueError: the account is not a str, or is empty.
    :raises DatabaseError: the database refuses.
    """
    if not isinstance(account_id, str) or not account_id:
        raise ValueError(f"account_id must be a str that is not empty, not {account_id!r}.")
    found = AccountTraces(account_id, using or alias(), using or router.db_for_write(OutboxMessage))
    consumers = sorted({pair for find in consumer_finders for pair in find()})
    own = IdempotencyRecord.objects.using(found.records_db).filter(account_id=account_id)
    scopes = {pk: Scope(account_id, *key) for pk, *key in own.values_list("pk", "operation", "idempotency_key")}
    found.records[account_id] = list(scopes)
    # Follow only the traces that begin with one of the account's own records. A client can send a key that has the form
    # of a message's key and so name the trace of another account. Those rows must not be erased.
    traces = {scope.derive_text("trace") for scope in scopes.values() if scope.trace == scope.derive_text("trace")}
    keys = _find_messages(found, {name for name, _ in consumers}, traces)
    for name, operation in consumers:
        theirs = IdempotencyRecord.objects.using(found.records_db).filter(account_id=name, operation=operation)
        pks = found.records.setdefault(name, [])
        for prefixes in _chunks(sorted(traces), PREFIXES):
            begins = Q()
            for trace in prefixes:
                begins |= Q(idempotency_key__startswith=f"{trace}.")
            pks += theirs.filter(begins).values_list("pk", flat=True)
        for chunk in _chunks(keys):
            pks += theirs.filter(idempotency_key__in=chunk).values_list("pk", flat=True)
        found.records[name] = sorted({*pks})
    return found


def _find_messages(found: AccountTraces, names: set[str], traces: set[str]) -> list[str]:
    """Add to ``found`` the account's messages, and the messages that consumers published in the account's traces.

    :returns: the keys under which the messages are consumed.
    """
    messages = OutboxMessage.objects.using(found.messages_db)
    ends = messages.aggregate(first=Min("pk"), last=Max("pk"))
    keys = []
    for start in range(ends["first"] or 0, (ends["last"] or -1) + 1, WINDOW):
        window = messages.filter(pk__gte=start, pk__lt=start + WINDOW, account_id__in=[found.account_id, *names])
        for pk, account_id, key in window.values_list("pk", "account_id", "idempotency_key"):
            if account_id == found.account_id or key.partition(".")[0] in traces:
                found.messages.append(pk)
                keys.append(key)
    return keys


def erase_account(
    account_id: str,
    *,
    by: Any,
    reason: str = "",
    include_unresolved: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    using: str | None = None,
) -> tuple[ErasureResult, dict[str, int]]:
    """Erase the traces of an account. Writes a line to the log ``idempotency.audit`` that does not name the account.

    :param by: who decides, for the audit: a user, or a name (str).
    :param reason: why, for the audit.
    :param include_unresolved: also erase abandoned claims, parked records and dead messages.
    :param batch_size: how many rows one transaction deletes at most, 1 to 500.
    :param using: a database alias; by default those that records and messages are written to.
    :returns: what was erased, and what is left, in the form of ``AccountTraces.count``.
    :raises ValueError: the account is not a str, or is empty; or the batch size is not between 1 and 500.
    :raises TypeError: ``by`` does not say who decides.
    :raises DatabaseError: the database refuses. What earlier batches erased stays erased.
    """
    found = find_traces(account_id, using=using)
    total = ErasureResult()
    for batch in erase_batches(found, include_unresolved=include_unresolved, batch_size=batch_size):
        total += batch
    left = found.count()
    record_erasure(total, left, by=by, reason=reason)
    return total, left


def record_erasure(total: ErasureResult, left: dict[str, int], *, by: Any, reason: str = "") -> None:
    """Write the line about an erasure to the log ``idempotency.audit``.

    :raises TypeError: ``by`` does not say who decides.
    """
    audit.require_name(by)
    audit.logger.info(
        "The traces of an account erased by %r: %d records, %d messages; left: %s; reason: %r",
        str(by),
        total.records,
        total.messages,
        ", ".join(f"{count} {name}" for name, count in left.items()) or "nothing",
        reason,
    )


def erase_batches(
    found: AccountTraces, *, include_unresolved: bool = False, batch_size: int = DEFAULT_BATCH_SIZE
) -> Iterator[ErasureResult]:
    """Erase batch after batch, each in a transaction of its own. The caller may stop between any two.

    Rows that another transaction has locked are skipped.

    :raises ValueError: the batch size is not between 1 and 500.
    :raises DatabaseError: the database refuses. What earlier batches erased stays erased.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    names = ERASED | UNRESOLVED if include_unresolved else ERASED
    finished, gone = _any_of(_RECORDS, names), _any_of(_MESSAGES, names)
    # Erase messages before records. A sent message whose consumer has no record looks like a lost message, and the
    # search for lost messages would have it sent again.
    for chunk in _chunks(found.messages, batch_size):
        messages = OutboxMessage.objects.using(found.messages_db).filter(gone, pk__in=chunk)
        yield ErasureResult(messages=_delete(messages))
    waiting = _keys_of_waiting(found)
    for account_id in sorted(found.records, key=lambda name: name == found.account_id):  # its own records last
        for chunk in _chunks(found.records[account_id], batch_size):
            # Keep the record of a message that is still in the outbox. The message will be delivered, perhaps for the
            # second time, and without the record the second delivery would run.
            records = _records(found.records_db, account_id, chunk).filter(finished)
            busy = [pk for pk, key in records.values_list("pk", "idempotency_key") if key in waiting]
            yield ErasureResult(records=_delete(records.exclude(pk__in=busy), account_id))


def _any_of(conditions: Mapping[str, Q], names: Collection[str]) -> Q:
    return functools.reduce(operator.or_, (condition for name, condition in conditions.items() if name in names))


def _keys_of_waiting(found: AccountTraces) -> set[str]:
    keys: set[str] = set()
    for chunk in _chunks(found.messages):
        waiting = OutboxMessage.objects.using(found.messages_db).filter(pk__in=chunk)
        keys.update(waiting.values_list("idempotency_key", flat=True))
    return keys


def _delete(rows: QuerySet[Any], account_id: str | None = None) -> int:
    """Delete rows in one transaction. If ``account_id`` is given, they are its records, and their steps go too."""
    using = rows.db

    def transact() -> int:
        with transaction.atomic(using=using, durable=True):
            sql.store(using).bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT)
            ids = sql.store(using).lock_free(rows.values_list("pk", flat=True))
            if account_id is not None:
                steps = IdempotencyStep.objects.using(using)
                steps.filter(account_id=account_id, record_id__in=ids).delete()
            # The DELETE repeats the conditions, because on a database that locks no rows here a record may have been
            # claimed since it was selected.
            return rows.filter(pk__in=ids).delete()[0]

    return sql.retry_lost_races(_MAX_ROUNDS, using, transact)


def _records(using: str, account_id: str, ids: Sequence[int]) -> QuerySet[IdempotencyRecord]:
    return IdempotencyRecord.objects.using(using).filter(account_id=account_id, pk__in=ids)


def _chunks(values: Sequence[Any], size: int = MAX_BATCH_SIZE) -> Iterator[Any]:
    return (values[start : start + size] for start in range(0, len(values), size))
