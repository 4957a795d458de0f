"""The backlog: count the messages that wait, requeue a dead one, purge the sent ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import connections, router, transaction
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet
from django.db.models.functions import Now

from .. import sql
from ..conf import settings
from ..models import MessageStatus, OutboxMessage
from ..upkeep import audit
from ..upkeep.batches import check_batch_size, in_batches
from ..upkeep.resolutions import ResolutionRefusedError
from ..upkeep.retention import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, PurgeResult
from .relay import IDLE_TIMEOUT, STATEMENT_TIMEOUT

#: Counting stops here, because counting millions takes long. A higher count would not tell the reader anything new.
MAX_COUNTED: Final = 10_000

#: A sent message is kept for ``TTL`` and this time. It tells a later request under the same key that its message needs
#: another id, so it has to outlive the consumer's record. That record is kept for ``TTL``, but begins only when the
#: message leaves its queue.
MAX_QUEUED: Final = timedelta(days=1)


@dataclass(frozen=True)
class Backlog:
    """The messages that have not been sent."""

    #: Messages that wait for a relay, for their time or for another message. Counted up to ``MAX_COUNTED``.
    pending: int
    #: How long the oldest due message has been due; None if no message is due.
    oldest_due: timedelta | None
    #: Messages that were tried too often and wait for somebody to requeue them. Counted up to ``MAX_COUNTED``.
    dead: int


def backlog(*, using: str | None = None) -> Backlog:
    """Count the messages that wait, and say for how long. Takes three statements on an index of unsent messages.

    If ``oldest_due`` is above a minute, no relay is running, a broker can't be reached, or a message holds up others of
    its ordering key.

    :param using: the database of the outbox; by default the one that messages are written to.
    :raises DatabaseError: the database refuses.
    """
    messages = OutboxMessage.objects.using(using or router.db_for_write(OutboxMessage))
    pending = messages.filter(status=MessageStatus.PENDING)
    # Read the first row in the order of the index. max() of the age would read all rows.
    longest = pending.filter(next_try_at__lte=Now()).order_by("next_try_at")
    age = ExpressionWrapper(Now() - F("next_try_at"), DurationField())
    return Backlog(
        pending=pending[:MAX_COUNTED].count(),
        oldest_due=longest.values_list(age, flat=True).first(),
        dead=messages.filter(status=MessageStatus.DEAD)[:MAX_COUNTED].count(),
    )


def requeue(message: OutboxMessage, *, by: Any, reason: str = "") -> None:
    """Have a dead message tried again, as often as a new one. It keeps its id and its place in its order.

    Writes a line to the log ``idempotency.audit``. If a user decides and the admin is installed, it also adds an entry
    to the admin's log, in the same transaction as the decision.

    :param message: the message as the person saw it. The instance is not changed; read it again.
    :param by: who decides, for the audit: a user, or a name (str).
    :param reason: why, for the audit.
    :raises ResolutionRefusedError: the message is not dead, or not any more.
    :raises TypeError: ``by`` does not say who decides.
    """
    audit.require_name(by)
    using = router.db_for_write(OutboxMessage)
    with transaction.atomic(using=using):
        # If two people decide at once, one wins, because the message is not dead after that. A relay that took the
        # message and froze may still mark it as sent, which is true then, or may postpone it a little.
        dead = OutboxMessage.objects.using(using).filter(pk=message.pk, status=MessageStatus.DEAD)
        if dead.update(status=MessageStatus.PENDING, attempts=0, next_try_at=Now(), lease_expires_at=None) != 1:
            raise ResolutionRefusedError(f"Message {message.message_id} is not dead, or not any more.")
        audit.enter(message, f"{message.topic} {message.message_id}", "requeued", by, reason)
        transaction.on_commit(lambda: _note(message, by, reason), using=using, robust=True)


def _note(message: OutboxMessage, by: Any, reason: str) -> None:
    audit.note(f"Message {message.message_id} on {message.topic!r}", "requeued", by, reason)


def sent_past_retention(using: str) -> QuerySet[OutboxMessage]:
    """The messages that a purge would delete now: sent longer ago than ``TTL`` and a day. Unsent ones are kept."""
    past = Now() - (settings.ttl + MAX_QUEUED)
    return OutboxMessage.objects.using(using).filter(status=MessageStatus.SENT, sent_at__lte=past)


def purge_sent_once(
    *, batch_size: int = DEFAULT_BATCH_SIZE, after: datetime | None = None, using: str | None = None
) -> PurgeResult:
    """Delete up to ``batch_size`` messages that were sent longer ago than ``TTL`` and a day, in one transaction.

    A sent message is still needed for that long. From it an attempt that runs again finds that it has already published
    the message, and a new request under an old key finds that the message's id is taken.

    :param batch_size: 1 to 10,000.
    :param after: skip messages that were sent before this time; see ``purge_sent_batches``.
    :param using: the database of the outbox; by default the one that messages are written to.
    :raises ValueError: the batch size is not between 1 and 10,000.
    :raises DatabaseError: the database refuses. Nothing of the batch is deleted then.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using = using or router.db_for_write(OutboxMessage)
    connection = connections[using]
    with transaction.atomic(using=using, durable=True):
        sql.store(using).bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT)
        due = sent_past_retention(using) if after is None else sent_past_retention(using).filter(sent_at__gte=after)
        due = due.order_by("sent_at", "pk")
        # Another purge deletes a locked row.
        found = sql.store(using).lock_free(due.values_list("pk", "sent_at"), batch_size)
        ids = [pk for pk, _ in found]
        # A statement takes a bounded number of parameters. On SQLite that number is low.
        step = max(1, connection.ops.bulk_batch_size([OutboxMessage._meta.pk], ids))
        # A sent message never changes, so the DELETE does not repeat the conditions.
        chunks = [ids[start : start + step] for start in range(0, len(ids), step)]
        deleted = sum(OutboxMessage.objects.using(using).filter(pk__in=chunk).delete()[0] for chunk in chunks)
    return PurgeResult(deleted, found[-1][1] if found else None, exhausted=len(found) < batch_size)


def purge_sent_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[PurgeResult]:
    """Purge batch after batch until nothing more is due. The caller may stop between any two.

    Each batch starts where the one before it ended, so that it does not read again the index entries of messages that
    are deleted and not vacuumed yet. Takes the arguments of ``purge_sent_once`` and raises the same errors.
    """

    return in_batches(
        lambda before: purge_sent_once(batch_size=batch_size, after=before.reached if before else None, using=using)
    )
