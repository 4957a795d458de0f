"""Maintenance of messages: count waiting ones, requeue a dead one, purge sent ones, find an account's messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.db import transaction
from django.db.models import DurationField, ExpressionWrapper, F, Max, Min, Q, QuerySet

from ..conf import settings
from ..extensions import Purge
from ..models import Now
from ..operate.erasure import TableRows
from ..operate.purge import DEFAULT_BATCH_SIZE, PurgeResult, purge_oldest
from ..operate.resolutions import ResolutionRefusedError, log_decision, require_name
from .models import MessageStatus, OutboxMessage, outbox_database

#: Counting stops here.
MAX_COUNTED: Final = 10_000

#: A sent message is kept for ``RETENTION`` plus this time. It shows a later request with the same key that its message
#: needs a different id, so it must outlive the consumer's record, whose ``RETENTION`` begins when the message leaves
#: its queue.
MAX_QUEUED: Final = timedelta(days=1)

#: An index on accounts would slow down every message, so an erasure reads the whole outbox in windows of this many ids.
WINDOW: Final = 10_000

_STATES: Final = {
    "pending": Q(status=MessageStatus.PENDING),
    "dead": Q(status=MessageStatus.DEAD),
    "sent": Q(status=MessageStatus.SENT),
    "unknown_messages": ~Q(status__in=list(MessageStatus)),
}


@dataclass(frozen=True)
class Backlog:
    """Unsent messages."""

    #: Messages that wait for a relay or until they are due. Counted up to ``MAX_COUNTED``.
    pending: int
    #: How long the oldest due message has been due; None if no message is due. If this is above a minute, no relay is
    #: running, or a broker can't be reached.
    oldest_due: timedelta | None
    #: Messages that wait to be requeued. Counted up to ``MAX_COUNTED``.
    dead: int


def backlog(*, using: str | None = None) -> Backlog:
    """Count the waiting messages and measure their delay. Three statements on the index of unsent messages."""
    messages = OutboxMessage.objects.using(using or outbox_database())
    pending = messages.filter(status=MessageStatus.PENDING)
    # The first row of the index. max() of the age would read all rows.
    longest = pending.filter(next_try_at__lte=Now()).order_by("next_try_at")
    age = ExpressionWrapper(Now() - F("next_try_at"), DurationField())
    return Backlog(
        pending=pending[:MAX_COUNTED].count(),
        oldest_due=longest.values_list(age, flat=True).first(),
        dead=messages.filter(status=MessageStatus.DEAD)[:MAX_COUNTED].count(),
    )


def requeue(message: OutboxMessage, *, by: Any, reason: str = "") -> None:
    """Requeue a dead message, with as many tries as a new one. It keeps its id. Logged like decisions about records.

    :param message: the message as the operator saw it. The instance is not changed; read it again.
    :param by: the operator, for the audit: a user, or a name (str).
    :param reason: the reason, for the audit.
    :raises ResolutionRefusedError: the message is not dead, or has changed since it was read.
    :raises TypeError: ``by`` is neither a user nor a non-empty str.
    """
    require_name(by)
    using = outbox_database()
    with transaction.atomic(using=using):
        # If two operators decide at once, one wins, because a requeued message has a different time, even when it is
        # dead again. A relay that took the message and froze may still mark it as sent, which is then true.
        dead = OutboxMessage.objects.using(using).filter(
            pk=message.pk, status=MessageStatus.DEAD, attempts=message.attempts, next_try_at=message.next_try_at
        )
        if dead.update(status=MessageStatus.PENDING, attempts=0, next_try_at=Now(), lease_expires_at=None) != 1:
            raise ResolutionRefusedError(
                f"Message {message.message_id} is not dead, or has changed since it was shown."
            )
        subject, title = f"Message {message.message_id} on {message.topic!r}", f"{message.topic} {message.message_id}"
        log_decision(message, subject, title, "requeued", by, reason, using=using)


def _sent_due() -> Q:
    past = Now() - (settings().defaults.retention + MAX_QUEUED)
    return Q(status=MessageStatus.SENT, sent_at__lte=past)


def sent_past_retention(using: str) -> QuerySet[OutboxMessage]:
    """The messages that a purge would delete now."""
    return OutboxMessage.objects.using(using).filter(_sent_due())


def purge_sent_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[PurgeResult]:
    """Delete messages that were sent longer ago than ``RETENTION`` and a day, as ``purge_batches`` does records."""
    using = using or outbox_database()
    messages, due = OutboxMessage.objects.using(using), _sent_due()
    return purge_oldest(
        using, batch_size, lambda upkeep, after: upkeep.delete_rows(messages, due, "sent_at", batch_size, after)
    )


PURGE_OF_SENT: Final = Purge("messages", "sent message", sent_past_retention, purge_sent_batches)


def find_messages(account_id: str, using: str | None) -> TableRows:
    messages = OutboxMessage.objects.using(using or outbox_database())
    ends = messages.aggregate(first=Min("pk"), last=Max("pk"))
    ids: list[int] = []
    for start in range(ends["first"] or 0, (ends["last"] or -1) + 1, WINDOW):
        window = messages.filter(account_id=account_id, pk__gte=start, pk__lt=start + WINDOW)
        ids += window.values_list("pk", flat=True)
    return TableRows(messages, account_id, ids, _STATES)
