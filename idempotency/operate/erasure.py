"""Erasure: delete an account's records with their steps and, with the outbox, its messages.

Finished records and sent messages are erased. Abandoned claims, parked records and dead messages, which wait for a
decision, are erased only on request. Live claims and unsent messages are never erased: without its row, such an
operation could take effect twice or not at all. Rows in a state of a newer release are also kept.

Close the account first, because a later retry or delivery of an erased record runs again. An erasure may be killed at
any point and repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

from django.db.models import Case, Q, QuerySet, Value, When

from ..extensions import AccountsRows, extensions
from ..lifecycle import Status
from ..models import IdempotencyRecord, IdempotencyStep, Now
from ..options import validators
from ..store import Upkeep, by_ids, records_database
from .batches import BatchResult, check_batch_size, in_transaction
from .resolutions import logger, require_name

DEFAULT_BATCH_SIZE: Final = 500
#: A statement has one parameter per row, and SQLite may accept no more than 999.
MAX_BATCH_SIZE: Final = 500

_LIVE = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
_RECORDS: Final = {
    "live": _LIVE,
    "abandoned": Q(status=Status.IN_PROGRESS) & ~_LIVE,
    "parked": Q(status=Status.PARKED),
    "finished": Q(status__in=[Status.COMPLETED, Status.RECOVERABLE]),
    # Written by a newer release, so it is unknown here whether they may be erased.
    "unknown_records": ~Q(status__in=list(Status)),
}
#: The states that are always erased, by the names of ``AccountRows.count``.
ERASED: Final = frozenset({"finished", "sent"})
#: The states that ``include_unresolved`` adds.
UNRESOLVED: Final = frozenset({"abandoned", "parked", "dead"})


@dataclass(frozen=True)
class TableRows:
    """An account's rows in one table, as found by one search."""

    #: All rows of the table.
    rows: QuerySet[Any]
    account_id: str
    ids: list[int]
    #: The states of rows, by name. Each row is in exactly one.
    states: Mapping[str, Q]

    def chunks(self, size: int = MAX_BATCH_SIZE) -> Iterator[list[int]]:
        """The ids in bounded parts."""
        return (self.ids[start : start + size] for start in range(0, len(self.ids), size))

    def in_states(self, names: Collection[str]) -> Q:
        """The account's rows in some states."""
        states = (condition for name, condition in self.states.items() if name in names)
        return Q(reduce(or_, states), account_id=self.account_id)

    def count(self) -> dict[str, int]:
        """Count the rows that still exist, by state."""
        state = Case(*(When(condition, then=Value(name)) for name, condition in self.states.items()))
        of_account = Q(account_id=self.account_id)
        counts: Counter[str] = Counter()
        for ids in self.chunks():
            counts.update(self.rows.filter(by_ids(ids, of_account)).values_list(state, flat=True))
        return {name: counts[name] for name in self.states}


@dataclass
class ErasureResult(BatchResult):
    """The counts of rows erased by one batch."""

    #: A record's steps are erased with it and not counted.
    records: int = 0
    messages: int = 0

    @property
    def touched(self) -> int:
        return self.records + self.messages


@dataclass(frozen=True)
class AccountRows:
    """An account's rows, as found by one search. Later rows are missing."""

    account_id: str
    records: TableRows
    #: None if there is no outbox.
    messages: AccountsRows | None

    def count(self) -> dict[str, int]:
        """Count the rows that still exist, by state.

        :returns: the number of ``live``, ``abandoned``, ``parked`` and ``finished`` records and of ``unknown_records``
            in a state of a newer release; with the outbox also of ``pending``, ``dead`` and ``sent`` messages and of
            ``unknown_messages``. Zeros are left out.
        """
        counts = self.records.count() | ({} if self.messages is None else self.messages.count())
        return {name: count for name, count in counts.items() if count}


def find_rows(account_id: str, *, using: str | None = None) -> AccountRows:
    """Find the rows of an account. Reads the whole outbox once, and the account's records.

    :raises ValueError: the account is not a str of 1 to 255 printable characters.
    """
    if problem := validators.name(account_id):
        raise ValueError(f"account_id {problem}, not {account_id!r}.")
    records = IdempotencyRecord.objects.using(using or records_database())
    ids = records.filter(account_id=account_id).values_list("pk", flat=True)
    found = [each.find_messages(account_id, using) for each in extensions() if each.find_messages]
    return AccountRows(
        account_id,
        TableRows(records, account_id, list(ids), _RECORDS),
        next(iter(found), None),
    )


def erase_account(
    account_id: str,
    *,
    by: Any,
    reason: str = "",
    include_unresolved: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    using: str | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[ErasureResult, dict[str, int]]:
    """Erase the rows of an account. Logs it to ``idempotency.audit`` without naming the account.

    :param by: the operator, for the audit: a user, or a name (str).
    :param reason: the reason, for the audit.
    :param include_unresolved: also erase abandoned claims, parked records and dead messages.
    :param batch_size: the maximum number of rows per transaction, 1 to 500.
    :param is_stopped: called after each batch; returns whether to stop.
    :returns: the counts of erased rows and, as ``AccountRows.count`` returns them, of remaining rows.
    :raises ValueError: the account is not a str of 1 to 255 printable characters, or the batch size is not between 1
        and 500.
    :raises TypeError: ``by`` is neither a user nor a non-empty str.
    """
    require_name(by)
    rows = find_rows(account_id, using=using)
    total = ErasureResult()
    for batch in erase_batches(rows, include_unresolved=include_unresolved, batch_size=batch_size):
        total += batch
        if is_stopped():
            break
    left = rows.count()
    logger.info(
        "The rows of an account erased by %r: %d records, %d messages; left: %s; reason: %r",
        str(by),
        total.records,
        total.messages,
        ", ".join(f"{count} {name}" for name, count in left.items()) or "nothing",
        reason,
    )
    return total, left


def erase_batches(
    account: AccountRows, *, include_unresolved: bool = False, batch_size: int = DEFAULT_BATCH_SIZE
) -> Iterator[ErasureResult]:
    """Erase in batches, each in one transaction. Skips locked rows. The caller may stop between batches.

    :raises ValueError: the batch size is not between 1 and 500.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    names = ERASED | UNRESOLVED if include_unresolved else ERASED
    waiting: set[str] = set()
    if account.messages is not None:
        # Erase messages before records: the search for lost messages resends a message whose consumer has no record.
        for ids in account.messages.chunks(batch_size):
            yield ErasureResult(messages=_delete(account.messages, ids, names))
        of_account = Q(account_id=account.account_id)
        for ids in account.messages.chunks():
            left = account.messages.rows.filter(by_ids(ids, of_account))
            waiting.update(left.values_list("idempotency_key", flat=True))
    for ids in account.records.chunks(batch_size):
        yield ErasureResult(records=_delete(account.records, ids, names, waiting))


def _delete(table: AccountsRows, ids: list[int], states: Collection[str], waiting: Collection[str] = ()) -> int:
    """Delete the rows in these states in one transaction, records with their steps.

    :param waiting: the keys of messages that are still in the outbox. Their consumers' records are kept: without them,
        a second delivery would run.
    """
    using = table.rows.db
    condition = table.in_states(states)

    def work(upkeep: Upkeep) -> int:
        found = upkeep.select_unlocked(
            table.rows.values_list("pk", "idempotency_key"), condition=by_ids(ids, condition)
        )
        free = [pk for pk, key in found if key not in waiting]
        if table.rows.model is IdempotencyRecord:
            steps = IdempotencyStep.objects.using(using)
            steps.filter(account_id=table.account_id, record_id__in=free).delete()
        # The DELETE repeats the conditions: on a database without row locks, a record may have been claimed since.
        return table.rows.filter(by_ids(free, condition)).delete()[0]

    return in_transaction(using, work)
