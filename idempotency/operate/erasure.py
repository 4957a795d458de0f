"""Erasure: delete an account's records with their steps and, if the outbox is installed, its messages.

Finished records and sent messages are erased. Abandoned claims, parked records and dead messages wait for a decision:
they are erased only if the caller says so. Live claims and messages that are still to be sent are never erased, because
without its row such an operation could take effect twice or not at all. Rows in a state of a newer release stay, too.

An erased record protects nothing any more: a retry or a delivery that comes later runs. So close the account first. An
erasure may be killed at any point and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from ..extensions import extensions
from ..lifecycle import Status
from ..models import IdempotencyRecord, IdempotencyStep
from ..options import validators
from ..store import Store, records_database
from .batches import BatchResult, check_batch_size, in_transaction
from .resolutions import logger, require_name

DEFAULT_BATCH_SIZE: Final = 500
#: A statement has one parameter for each row of a batch, and SQLite may accept no more than 999 parameters.
MAX_BATCH_SIZE: Final = 500

_LIVE = Q(status=Status.IN_PROGRESS, lease_expires_at__gt=Now())
_RECORDS: Final = {
    "live": _LIVE,
    "abandoned": Q(status=Status.IN_PROGRESS) & ~_LIVE,
    "parked": Q(status=Status.PARKED),
    "finished": Q(status__in=[Status.COMPLETED, Status.RECOVERABLE]),
    # Written by a newer release: this one does not know which of them may be erased.
    "unknown_records": ~Q(status__in=list(Status)),
}
#: The states whose rows are always erased, in the names of ``AccountRows.count``.
ERASED: Final = frozenset({"finished", "sent"})
#: The states whose rows are erased as well with ``include_unresolved``.
UNRESOLVED: Final = frozenset({"abandoned", "parked", "dead"})


@dataclass(frozen=True)
class TableRows:
    """An account's rows in one table. Their ids are searched for once."""

    rows: QuerySet[Any]
    ids: list[int]
    #: The states of a row, by the names under which they are counted. Each row is in exactly one of them.
    states: Mapping[str, Q]

    def chunks(self, size: int = MAX_BATCH_SIZE, states: Collection[str] | None = None) -> Iterator[QuerySet[Any]]:
        """The rows that exist now, in bounded parts. If ``states`` are named, only the rows in one of them."""
        named = self.states if states is None else states
        condition = reduce(or_, (condition for name, condition in self.states.items() if name in named))
        for start in range(0, len(self.ids), size):
            yield self.rows.filter(condition, pk__in=self.ids[start : start + size])

    def count(self) -> dict[str, int]:
        return {name: sum(rows.count() for rows in self.chunks(states=[name])) for name in self.states}


@dataclass
class ErasureResult(BatchResult):
    """The rows that one batch has erased, as counts."""

    #: The steps of a record are erased with it and are not counted.
    records: int = 0
    #: The messages of the outbox.
    messages: int = 0

    @property
    def touched(self) -> int:
        return self.records + self.messages


@dataclass(frozen=True)
class AccountRows:
    """The rows of an account. They are searched for once: rows that are written later are missing."""

    account_id: str
    records: TableRows
    #: None if there is no outbox.
    messages: TableRows | None

    def count(self) -> dict[str, int]:
        """Count the rows that exist now, by their state.

        :returns: the number of ``live``, ``abandoned``, ``parked`` and ``finished`` records and of ``unknown_records``
            in a state of a newer release; with the outbox also of ``pending``, ``dead`` and ``sent`` messages and of
            ``unknown_messages``. Names whose count is 0 are left out.
        """
        counts = self.records.count() | ({} if self.messages is None else self.messages.count())
        return {name: count for name, count in counts.items() if count}


def find_rows(account_id: str, *, using: str | None = None) -> AccountRows:
    """Find the rows of an account. Reads the whole outbox once, and the account's records.

    :raises ValueError: no record can have this account: it is not a str of 1 to 255 printable characters.
    """
    if problem := validators.name(account_id):
        raise ValueError(f"account_id {problem}, not {account_id!r}.")
    records = IdempotencyRecord.objects.using(using or records_database()).filter(account_id=account_id)
    found = [each.find_messages(account_id, using) for each in extensions() if each.find_messages]
    return AccountRows(
        account_id,
        TableRows(records, list(records.values_list("pk", flat=True)), _RECORDS),
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
    """Erase the rows of an account. Writes a line to the log ``idempotency.audit`` that does not name the account.

    :param by: who decides, for the audit: a user, or a name (str).
    :param reason: why, for the audit.
    :param include_unresolved: also erase abandoned claims, parked records and dead messages.
    :param batch_size: how many rows one transaction deletes at most, 1 to 500.
    :param is_stopped: called after each batch; returns whether to leave the rest.
    :returns: the counts of erased rows, and those of the remaining ones as ``AccountRows.count`` returns them.
    :raises ValueError: the account is not a str of 1 to 255 printable characters, or the batch size is not between 1
        and 500.
    :raises TypeError: ``by`` does not say who decides.
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
    """Erase batch after batch, each in its own transaction. The caller may stop between any two.

    Rows that another transaction has locked are skipped.

    :raises ValueError: the batch size is not between 1 and 500.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    names = ERASED | UNRESOLVED if include_unresolved else ERASED
    waiting: set[str] = set()
    if account.messages is not None:
        # Erase messages before records. A sent message whose consumer has no record looks like a lost message, and the
        # search for lost messages would have it sent again.
        for messages in account.messages.chunks(batch_size, names):
            yield ErasureResult(messages=_delete(messages))
        for left in account.messages.chunks():
            waiting.update(left.values_list("idempotency_key", flat=True))
    for records in account.records.chunks(batch_size, names):
        # Keep the record of a message that is still in the outbox. The message is yet to be delivered, perhaps for the
        # second time, and without the record the second delivery would run.
        busy = [pk for pk, key in records.values_list("pk", "idempotency_key") if key in waiting]
        yield ErasureResult(records=_delete(records.exclude(pk__in=busy), account.account_id))


def _delete(rows: QuerySet[Any], account_id: str | None = None) -> int:
    """Delete rows in one transaction. If ``account_id`` is given, they are its records, and their steps go too."""
    using = rows.db

    def work(store: Store) -> int:
        ids = store.select_unlocked(rows.values_list("pk", flat=True))
        if account_id is not None:
            steps = IdempotencyStep.objects.using(using)
            steps.filter(account_id=account_id, record_id__in=ids).delete()
        # The DELETE repeats the conditions, because on a database that locks no rows here a record may have been
        # claimed since it was selected.
        return rows.filter(pk__in=ids).delete()[0]

    return in_transaction(using, work)
