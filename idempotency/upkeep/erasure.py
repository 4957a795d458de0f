"""Erasure: delete what an account has left in this app's tables, as when a person asks for it.

That is its records with their steps, its messages in the outbox, and what consumers have recorded and published under a
name of their own because of it. What is finished is erased. What is still under way is not, because without its row it
could take effect twice or not at all: a live claim, and a message that is still to be sent. Abandoned claims, parked
records and dead messages wait for somebody, and are erased only if the caller says so.

An erased record protects nothing any more: a retry or a delivery that comes later runs. So the account is closed first.

The entries of the admin's log name no account, and neither do the counters. Everything here may be killed anywhere and
simply run again: what shows where else to look, the account's own records, is erased last.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from django.db import connections, router, transaction
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
#: A statement names every row of a batch, and SQLite may take no more than 999 parameters.
MAX_BATCH_SIZE: Final = 500

#: The outbox has no index on accounts, which every message would pay for. It is read once, so many ids at a time.
WINDOW: Final = 10_000
#: Prefixes of keys that one statement looks for.
PREFIXES: Final = 50

#: An erasure that freezes before its COMMIT holds its rows for no longer than this, and no statement takes longer.
IDLE_TIMEOUT: Final = timedelta(seconds=5)
STATEMENT_TIMEOUT: Final = timedelta(seconds=60)
_MAX_ROUNDS = 5

#: Callables that say under which names consumers record: pairs of an account and an operation. An integration adds one.
consumer_finders: list[Callable[[], Iterable[tuple[str, str]]]] = []

_LIVE = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
_RECORDS: Final = {
    "live": _LIVE,
    "abandoned": Q(status=Status.IN_PROGRESS) & ~_LIVE,
    "parked": Q(status=Status.PARKED),
    "finished": Q(status__in=[Status.COMPLETED, Status.RECOVERABLE]),
}
#: What is erased, and what besides if the caller says so: of the names in ``AccountTraces.count``.
ERASED: Final = frozenset({"finished", "sent"})
UNRESOLVED: Final = frozenset({"abandoned", "parked", "dead"})
_MESSAGES: Final = {
    "pending": Q(status=MessageStatus.PENDING),
    "dead": Q(status=MessageStatus.DEAD),
    "sent": Q(status=MessageStatus.SENT),
}


@dataclass
class ErasureResult(BatchResult):
    """What one batch has erased, as counts of rows."""

    #: Records, each with its steps.
    records: int = 0
    messages: int = 0

    @property
    def touched(self) -> int:
        return self.records + self.messages


@dataclass
class AccountTraces:
    """What an account has left: the ids of rows, found once. What is written later is not among them."""

    account_id: str
    records_db: str
    messages_db: str
    #: Ids of records, by the account that they stand under: this one, or a consumer's name.
    records: dict[str, list[int]] = field(default_factory=dict)
    #: Ids of messages.
    messages: list[int] = field(default_factory=list)

    def count(self) -> dict[str, int]:
        """How much of it there is now, by what has become of it: ``live``, ``abandoned``, ``parked`` and ``finished``
        records, ``pending``, ``dead`` and ``sent`` messages. Without those of which there is none."""
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
    """Find what an account has left. Reads the outbox once, and of the records those of the account.

    :param using: a database; by default those that records and messages are written to.
    :raises ValueError: the account is no text, or empty.
    """
    if not isinstance(account_id, str) or not account_id:
        raise ValueError(f"account_id must be a str that is not empty, not {account_id!r}.")
    found = AccountTraces(account_id, using or alias(), using or router.db_for_write(OutboxMessage))
    consumers = sorted({pair for find in consumer_finders for pair in find()})
    own = IdempotencyRecord.objects.using(found.records_db).filter(account_id=account_id)
    scopes = {pk: Scope(account_id, *key) for pk, *key in own.values_list("pk", "operation", "idempotency_key")}
    found.records[account_id] = list(scopes)
    # Only traces that begin here. A client that sends a key of a message's form can name any trace, and what another
    # account has led to is not this one's to erase.
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
    """Find the account's messages, and those that consumers have published because of it.

    :returns: the keys under which they are consumed.
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
    """Erase what an account has left. Leaves a line in the log ``idempotency.audit`` that does not name the account.

    :param by: who decides, for the audit: a user, or a name (str).
    :param include_unresolved: erase abandoned claims, parked records and dead messages, too.
    :param using: a database; by default those that records and messages are written to.
    :returns: what was erased; and what is left of it, as ``AccountTraces.count`` says it.
    :raises ValueError: the account is no text, or empty; or the batch size is not between 1 and 500.
    :raises TypeError: ``by`` does not say who decides.
    :raises DatabaseError: as the database does. What earlier batches erased stays erased.
    """
    found = find_traces(account_id, using=using)
    total = ErasureResult()
    for batch in erase_batches(found, include_unresolved=include_unresolved, batch_size=batch_size):
        total += batch
    left = found.count()
    record_erasure(total, left, by=by, reason=reason)
    return total, left


def record_erasure(total: ErasureResult, left: dict[str, int], *, by: Any, reason: str = "") -> None:
    """Leave the audit's line.

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

    What another transaction holds locked is passed over.

    :raises ValueError: the batch size is not between 1 and 500.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    names = ERASED | UNRESOLVED if include_unresolved else ERASED
    finished, gone = _any_of(_RECORDS, names), _any_of(_MESSAGES, names)
    # Messages first: one that was sent and has no record with its consumer would be taken for lost, and sent again.
    for chunk in _chunks(found.messages, batch_size):
        messages = OutboxMessage.objects.using(found.messages_db).filter(gone, pk__in=chunk)
        yield ErasureResult(messages=_delete(messages))
    waiting = _keys_of_waiting(found)
    for account_id in sorted(found.records, key=lambda name: name == found.account_id):  # its own records last
        for chunk in _chunks(found.records[account_id], batch_size):
            # A message that is still in the outbox will be delivered, once more if it was before.
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
    """Delete rows in one transaction, and the steps of those that are records of ``account_id``."""
    using = rows.db

    def transact() -> int:
        with transaction.atomic(using=using, durable=True):
            sql.store(using).bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT)
            skips = connections[using].features.has_select_for_update_skip_locked
            free = rows.select_for_update(skip_locked=True) if skips else rows
            ids = list(free.values_list("pk", flat=True))
            if account_id is not None:
                steps = IdempotencyStep.objects.using(using)
                steps.filter(account_id=account_id, record_id__in=ids).delete()
            # What makes them erasable is named again: without the locks a record may have been claimed meanwhile.
            return (rows.filter(pk__in=ids) if skips else rows).delete()[0]

    return sql.retry_lost_races(_MAX_ROUNDS, using, transact)


def _records(using: str, account_id: str, ids: Sequence[int]) -> QuerySet[IdempotencyRecord]:
    return IdempotencyRecord.objects.using(using).filter(account_id=account_id, pk__in=ids)


def _chunks(values: Sequence[Any], size: int = MAX_BATCH_SIZE) -> Iterator[Any]:
    return (values[start : start + size] for start in range(0, len(values), size))
