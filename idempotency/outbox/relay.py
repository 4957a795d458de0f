"""The relay: hand messages of the outbox to their brokers, one bounded batch at a time.

A relay leases a batch in a transaction of its own, sends its messages outside of any transaction, and then marks them
as sent. If it dies or freezes at any point, the lease runs out and another relay sends the remaining messages. Some of
them are then sent twice, because a broker's confirmation and a database's COMMIT can't be made atomic. So a message may
be sent more than once, but always with the same id.

Messages are found by status and due time, and never by remembering the highest id that was sent. The database assigns
ids before the COMMIT, so a lower id may appear after a higher one was sent.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import connections, router, transaction
from django.db.models import BooleanField, Exists, ExpressionWrapper, F, OuterRef, Q, QuerySet
from django.db.models.functions import Now
from django.utils.module_loading import import_string

from .. import signals, sql
from ..exceptions import BrokerUnavailableError
from ..models import MessageStatus, OutboxMessage
from ..protocol.faults import fault_point
from ..protocol.reasons import reason_of
from ..upkeep.batches import BatchResult, check_batch_size, in_batches
from .propagation import sending_contexts

logger = logging.getLogger("idempotency")

#: Confirmed messages are marked together, so at most this many are sent again if a relay dies.
DEFAULT_BATCH_SIZE = 100
#: Two statements have a parameter for each message of a batch, and SQLite may accept no more than 999 parameters.
MAX_BATCH_SIZE = 500

#: How long a relay that has taken a batch is presumed alive. It stops sending when half of this time has passed, so the
#: sender may need the other half for its last message. Only a relay that froze sends messages that another has taken
#: over.
LEASE = timedelta(seconds=60)

#: A message is tried again after 2, 4, 8 … seconds and later every hour. After 16 attempts, about five hours, it is
#: dead. By then a new deploy may have corrected the cause, and if not, a person should look at the message the same
#: day. An attempt that could not reach the broker does not count.
MAX_ATTEMPTS = 16
LONGEST_BACKOFF = 3600  # seconds
#: How soon a broker that could not be reached is tried again. Soon, because another attempt costs almost nothing.
UNAVAILABLE_BACKOFF = timedelta(seconds=5)

#: One message of a batch may have killed its relay: a poison message. A message that was left over from this many
#: batches whose relay disappeared is sent alone from then on.
SUSPICIOUS = 2

#: If a relay freezes while it takes a batch, the database ends the transaction after this time and frees the rows.
IDLE_TIMEOUT = timedelta(seconds=5)
#: The database cancels a statement that runs for longer, including its wait for locks.
STATEMENT_TIMEOUT = timedelta(seconds=30)

#: If the database refuses a transaction because of another relay (REPEATABLE READ, InnoDB), it is tried this often.
_MAX_ROUNDS = 5


@dataclass
class RelayResult(BatchResult):
    """The result of one batch of a relay, as counts of messages. It is exhausted if nothing more can be sent now."""

    #: Confirmed by their broker, and not marked as sent before.
    sent: int = 0
    #: Their sender raised an error. They are tried again after a while.
    postponed: int = 0
    #: Their sender failed too often, or their relay died too often. They wait for somebody to requeue them.
    dead: int = 0
    #: Not tried, because a broker can't be reached, an earlier message of their order was not sent, or the time was up.
    put_back: int = 0
    #: The senders whose broker can't be reached, each with the error.
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def touched(self) -> int:
        return self.sent + self.postponed + self.dead


def due(using: str) -> QuerySet[OutboxMessage]:
    """The messages that may be sent now, in no particular order."""
    messages = OutboxMessage.objects.using(using)
    free = Q(lease_expires_at=None) | Q(lease_expires_at__lte=Now())
    # Written exactly as the conditions of the partial index, so that the planner uses it.
    earlier = messages.exclude(ordering_key="").exclude(status=MessageStatus.SENT)
    held_up = Exists(earlier.filter(ordering_key=OuterRef("ordering_key"), pk__lt=OuterRef("pk")))
    return messages.filter(free, Q(ordering_key="") | ~held_up, status=MessageStatus.PENDING, next_try_at__lte=Now())


def relay_once(
    *, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None, skip: Collection[str] = ()
) -> RelayResult:
    """Send up to ``batch_size`` due messages, beginning with those that have been due longest.

    Many relays may run at once, and a relay may be killed. Don't call this inside a transaction.

    :param batch_size: 1 to 500.
    :param using: the database of the outbox; by default the one that messages are written to.
    :param skip: senders whose messages are left alone, because their broker can't be reached.
    :returns: what became of the messages.
    :raises ValueError: the batch size is not between 1 and 500.
    :raises RuntimeError: there is an open transaction.
    :raises DatabaseError: the database refuses. Messages that were sent and could not be marked are sent again.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using = using or router.db_for_write(OutboxMessage)
    until = time.monotonic() + LEASE.total_seconds() / 2  # counted from here, because the lease begins later
    batch = _take(using, batch_size, skip)
    fault_point("relay.claimed")
    result = RelayResult(exhausted=batch.exhausted)
    for messages in (batch.messages, batch.suspects):
        if messages:
            _settle(using, _send(messages, until, result), result)
    for message in batch.dead:
        _announce_dead(message, result)
    return result


def relay_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[RelayResult]:
    """Send batch after batch until nothing more is due. The caller may stop between any two.

    If a sender could not reach its broker, later batches leave its messages alone, so that it does not hold up the
    others. Raises the errors of ``relay_once``.
    """
    unreachable: set[str] = set()

    def take(before: RelayResult | None) -> RelayResult:
        if before is not None:
            unreachable.update(before.unavailable)
        return relay_once(batch_size=batch_size, using=using, skip=unreachable)

    return in_batches(take)


@dataclass
class _Batch:
    messages: list[OutboxMessage]
    #: At most one message that may be poison. It is sent after all others are marked, so that if the relay disappears,
    #: only this message can be the cause.
    suspects: list[OutboxMessage]
    #: Messages whose relays have disappeared too often.
    dead: list[OutboxMessage]
    exhausted: bool


def _take(using: str, limit: int, skip: Collection[str]) -> _Batch:
    def transact() -> _Batch:
        # If the process dies before the COMMIT, nothing was taken. If it dies after the COMMIT, the lease runs out. If
        # it freezes before the COMMIT, the rows stay locked until the database ends the session after IDLE_TIMEOUT.
        # Other relays skip the rows meanwhile.
        with transaction.atomic(using=using, durable=True):
            sql.store(using).bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT)
            return _take_in_transaction(using, limit, skip)

    return sql.retry_lost_races(_MAX_ROUNDS, using, transact)


def _take_in_transaction(using: str, limit: int, skip: Collection[str]) -> _Batch:
    ready = due(using).exclude(sender__in=list(skip)).order_by("next_try_at", "pk")
    found = sql.store(using).lock_free(ready, limit)
    suspicious = [message for message in found if _may_be_poison(message)]
    dead = [message for message in suspicious if message.attempts >= MAX_ATTEMPTS]
    suspects = [message for message in suspicious if message.attempts < MAX_ATTEMPTS][:1]
    messages = [message for message in found if not _may_be_poison(message)]
    messages += _followers(using, messages, limit - len(found), skip)
    _lease(using, messages + suspects)
    _mark_dead(using, dead)
    return _Batch(messages, suspects, dead, exhausted=len(messages) < limit and not suspicious)


def _may_be_poison(message: OutboxMessage) -> bool:
    return message.lease_expires_at is not None and message.attempts >= SUSPICIOUS


def _lease(using: str, messages: list[OutboxMessage]) -> None:
    if messages:
        mine = OutboxMessage.objects.using(using).filter(pk__in=[message.pk for message in messages])
        mine.update(attempts=F("attempts") + 1, lease_expires_at=Now() + LEASE)
    for message in messages:
        message.attempts += 1


def _mark_dead(using: str, poison: list[OutboxMessage]) -> None:
    error = f"A relay disappeared while it had this message, {MAX_ATTEMPTS} times."
    if poison:
        dead = OutboxMessage.objects.using(using).filter(pk__in=[message.pk for message in poison])
        dead.update(status=MessageStatus.DEAD, lease_expires_at=None, error=error)
    for message in poison:
        message.error = error


def _followers(using: str, heads: list[OutboxMessage], limit: int, skip: Collection[str]) -> list[OutboxMessage]:
    """Find the messages that directly follow the ordered messages of ``heads``.

    No other relay can take them while the heads are not sent.
    """
    last = {message.ordering_key: message.pk for message in heads if message.ordering_key}
    if not last or limit < 1:
        return []
    free = Q(lease_expires_at=None) | Q(lease_expires_at__lte=Now(), attempts__lt=SUSPICIOUS)
    ready = free & Q(status=MessageStatus.PENDING, next_try_at__lte=Now())
    unsent = OutboxMessage.objects.using(using).exclude(ordering_key="").exclude(status=MessageStatus.SENT)
    behind = unsent.filter(ordering_key__in=last, pk__gt=min(last.values())).order_by("ordering_key", "pk")
    if connections[using].features.has_select_for_update:
        # Another relay may be taking one of these messages at this moment, if its head was committed after it. Wait for
        # that row instead of skipping it, because the messages behind it have to wait for it, too.
        behind = behind.select_for_update()
    found: list[OutboxMessage] = []
    for message in behind.annotate(ready=ExpressionWrapper(ready, BooleanField()))[: limit + len(last)]:
        if message.pk > last.get(message.ordering_key, message.pk):
            if message.ready and message.sender not in skip:
                found.append(message)
            else:
                del last[message.ordering_key]
    return found[:limit]


@dataclass
class _Outcomes:
    confirmed: list[OutboxMessage] = field(default_factory=list)
    failed: list[tuple[OutboxMessage, str]] = field(default_factory=list)
    put_back: list[tuple[OutboxMessage, str]] = field(default_factory=list)


def _send(messages: list[OutboxMessage], until: float, result: RelayResult) -> _Outcomes:
    outcomes = _Outcomes()
    held_up: set[str] = set()
    for message in messages:
        if time.monotonic() >= until:
            outcomes.put_back.append((message, ""))
            result.exhausted = False
        elif message.sender in result.unavailable:
            outcomes.put_back.append((message, result.unavailable[message.sender]))
        elif message.ordering_key in held_up:
            outcomes.put_back.append((message, ""))
        else:
            try:
                _hand_over(message)
            except BrokerUnavailableError as error:
                logger.warning("Sender %s can't reach its broker", message.sender, exc_info=True)
                result.unavailable[message.sender] = reason_of(error)
                outcomes.put_back.append((message, reason_of(error)))
            # A sender is the project's code and may raise anything. The other messages must be sent all the same.
            except Exception as error:
                logger.exception("Message %s on %s was not sent", message.message_id, message.topic)
                outcomes.failed.append((message, reason_of(error)))
            else:
                fault_point("relay.published")
                outcomes.confirmed.append(message)
                continue
        if message.ordering_key:
            held_up.add(message.ordering_key)
    return outcomes


def _hand_over(message: OutboxMessage) -> None:
    send: Callable[[OutboxMessage], None] = import_string(message.sender)
    with ExitStack() as stack:
        for context in sending_contexts:
            stack.enter_context(context(message))
        send(message)


def _settle(using: str, outcomes: _Outcomes, result: RelayResult) -> None:
    messages = OutboxMessage.objects.using(using)
    if outcomes.confirmed:
        # This update is not fenced. Even if the relay was slow and lost its lease, the broker has the message.
        confirmed = messages.filter(pk__in=[message.pk for message in outcomes.confirmed])
        sent = confirmed.exclude(status=MessageStatus.SENT).update(
            status=MessageStatus.SENT, sent_at=Now(), lease_expires_at=None, error=""
        )
        fault_point("relay.marked")
        result.sent += sent
        signals.relayed.send_robust(sender=OutboxMessage, count=sent)
    # The other updates are fenced by the attempt number, because another relay may have taken or sent the message.
    mine = messages.filter(status=MessageStatus.PENDING)
    for (attempts, error), failed in _alike(outcomes.failed).items():
        if attempts < MAX_ATTEMPTS:
            backoff = timedelta(seconds=min(2**attempts, LONGEST_BACKOFF))
            postponed = mine.filter(pk__in=[message.pk for message in failed], attempts=attempts)
            result.postponed += postponed.update(next_try_at=Now() + backoff, lease_expires_at=None, error=error)
            continue
        for message in failed:
            over = mine.filter(pk=message.pk, attempts=attempts)
            if over.update(status=MessageStatus.DEAD, lease_expires_at=None, error=error):
                message.error = error
                _announce_dead(message, result)
    for (attempts, error), put_back in _alike(outcomes.put_back).items():
        later: dict[str, Any] = {"next_try_at": Now() + UNAVAILABLE_BACKOFF, "error": error} if error else {}
        untried = mine.filter(pk__in=[message.pk for message in put_back], attempts=attempts)
        result.put_back += untried.update(attempts=F("attempts") - 1, lease_expires_at=None, **later)


def _alike(messages: list[tuple[OutboxMessage, str]]) -> dict[tuple[int, str], list[OutboxMessage]]:
    """Group messages by attempts and error. A batch mostly fails for one reason, so one statement updates many rows."""
    groups = defaultdict(list)
    for message, error in messages:
        groups[message.attempts, error].append(message)
    return groups


def _announce_dead(message: OutboxMessage, result: RelayResult) -> None:
    result.dead += 1
    logger.error("Message %s on %s is dead: %s", message.message_id, message.topic, message.error)
    signals.message_dead.send_robust(
        sender=OutboxMessage,
        account_id=message.account_id,
        idempotency_key=message.idempotency_key,
        attempt=message.attempts,
        message_id=message.message_id,
        topic=message.topic,
    )
