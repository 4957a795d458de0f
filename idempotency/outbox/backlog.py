"""What is done about messages besides sending them: count those that wait, requeue a dead one, forget what was sent."""

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

#: Counting stops here. More say no more, and a count of millions takes its time.
MAX_COUNTED: Final = 10_000

#: A sent message is kept for longer than ``TTL`` by this. It tells a later request under the same key that the id is
#: taken, and so has to outlive the record of its consumer, which begins when the message has lain in its queue.
MAX_QUEUED: Final = timedelta(days=1)


@dataclass(frozen=True)
class Backlog:
    """What of the outbox has not been sent."""

    #: Waiting for a relay, for their time or for another message. Counted up to ``MAX_COUNTED``.
    pending: int
    #: How long the message that has been due longest has been; None if none is.
    oldest_due: timedelta | None
    #: Tried too often, and waiting for somebody to requeue them. Counted up to ``MAX_COUNTED``.
    dead: int


def backlog(*, using: str | None = None) -> Backlog:
    """How much waits, and for how long. Three statements on an index that holds nothing else.

    ``oldest_due`` above a minute says that no relay runs, that a broker can't be reached, or that a message holds up
    others of its ordering key.
    """
    messages = OutboxMessage.objects.using(using or router.db_for_write(OutboxMessage))
    pending = messages.filter(status=MessageStatus.PENDING)
    # In the order of the index. max() of the difference would read all of them.
    longest = pending.filter(next_try_at__lte=Now()).order_by("next_try_at")
    age = ExpressionWrapper(Now() - F("next_try_at"), DurationField())
    return Backlog(
        pending=pending[:MAX_COUNTED].count(),
        oldest_due=longest.values_list(age, flat=True).first(),
        dead=messages.filter(status=MessageStatus.DEAD)[:MAX_COUNTED].count(),
    )


def requeue(message: OutboxMessage, *, by: Any, reason: str = "") -> None:
    """Have a dead message tried again, as often as a new one. Its place in its order and its id stay what they are.

    The decision and its entry in the admin's log, where there is one and a user decides, are committed together. It
    leaves a line in the log ``idempotency.audit``, too.

    :param message: as the decision was made on it. It is not changed; read it again.
    :param by: who decides, for the audit: a user, or a name (str).
    :raises ResolutionRefusedError: the message is not dead, or not any more.
    """
    audit.require_name(by)
    using = router.db_for_write(OutboxMessage)
    with transaction.atomic(using=using):
        # Of two people who decide at once one wins: after that it isn't dead any more. A relay that had it and was
        # frozen since may yet mark it as sent, which is then true, or may put it off a little.
        dead = OutboxMessage.objects.using(using).filter(pk=message.pk, status=MessageStatus.DEAD)
        if dead.update(status=MessageStatus.PENDING, attempts=0, next_try_at=Now(), lease_expires_at=None) != 1:
            raise ResolutionRefusedError(f"Message {message.message_id} is not dead, or not any more.")
        audit.enter(message, f"{message.topic} {message.message_id}", "requeued", by, reason)
        transaction.on_commit(lambda: _note(message, by, reason), using=using, robust=True)


def _note(message: OutboxMessage, by: Any, reason: str) -> None:
    audit.note(f"Message {message.message_id} on {message.topic!r}", "requeued", by, reason)


def sent_past_retention(using: str) -> QuerySet[OutboxMessage]:
    """What was sent longer ago than ``TTL`` and a day, and would be purged now. Never what was not sent."""
    past = Now() - (settings.ttl + MAX_QUEUED)
    return OutboxMessage.objects.using(using).filter(status=MessageStatus.SENT, sent_at__lte=past)


def purge_sent_once(
    *, batch_size: int = DEFAULT_BATCH_SIZE, after: datetime | None = None, using: str | None = None
) -> PurgeResult:
    """Delete up to ``batch_size`` messages that were sent longer ago than ``TTL`` and a day, in one transaction.

    While it is kept, a sent message is how an attempt that runs again finds that it has published it already, and how
    a new request under an old key finds that the message's id is taken.

    :param after: skips what was sent before; see ``purge_sent_batches``.
    :raises ValueError: the batch size is not between 1 and 10,000.
    :raises DatabaseError: as the database does; nothing of the batch is deleted then.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using = using or router.db_for_write(OutboxMessage)
    connection = connections[using]
    with transaction.atomic(using=using, durable=True):
        sql.store(using).bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT)
        due = sent_past_retention(using) if after is None else sent_past_retention(using).filter(sent_at__gte=after)
        due = due.order_by("sent_at", "pk")
        if connection.features.has_select_for_update_skip_locked:
            due = due.select_for_update(skip_locked=True)  # a locked one is being deleted by another purge
        found = list(due.values_list("pk", "sent_at")[:batch_size])
        ids = [pk for pk, _ in found]
        # A statement takes a bounded number of parameters, on SQLite a low one.
        step = max(1, connection.ops.bulk_batch_size([OutboxMessage._meta.pk], ids))
        # A message that is sent stays as it is, so nothing has to be looked at again.
        chunks = [ids[start : start + step] for start in range(0, len(ids), step)]
        deleted = sum(OutboxMessage.objects.using(using).filter(pk__in=chunk).delete()[0] for chunk in chunks)
    return PurgeResult(deleted, found[-1][1] if found else None, exhausted=len(found) < batch_size)


def purge_sent_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[PurgeResult]:
    """Purge batch after batch until nothing more is due. The caller may stop between any two.

    Each starts where the one before it ended, so as not to walk over what is deleted and not vacuumed yet.
    """

    return in_batches(
        lambda before: purge_sent_once(batch_size=batch_size, after=before.reached if before else None, using=using)
    )
