"""The relay: sends messages of the outbox to their brokers, in bounded batches.

A relay leases a batch in a transaction, sends its messages outside any transaction, and then marks them as sent. If it
dies or freezes, the lease runs out and another relay sends the remaining messages. Because a broker's confirmation and
a COMMIT can't be atomic, a message may be sent more than once, but always with the same id.

Messages are found by status and due time, not by the highest id sent, because a lower id may commit after a higher one
was sent.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

from django.db.models import F, Q, QuerySet
from django.utils.module_loading import import_string

from .. import signals
from ..exceptions import BrokerUnavailableError, ReceiverBusyError
from ..extensions import extensions
from ..models import Now
from ..operate.batches import BatchResult, check_batch_size, in_batches, in_transaction
from ..outcome import reason_of
from ..protocol.faults import fault_point
from ..store import Upkeep
from .models import MessageStatus, OutboxMessage, outbox_database

logger: Final = logging.getLogger("idempotency")

#: Confirmed messages are marked together, so a relay that dies causes at most this many repetitions.
DEFAULT_BATCH_SIZE = 100
#: Two statements have a parameter per message, and SQLite may accept no more than 999.
MAX_BATCH_SIZE = 500

#: How long a relay that took a batch is presumed alive. It stops sending at half of this time, which leaves the other
#: half for its last message. So only a relay that froze sends messages that another relay has taken over.
LEASE = timedelta(seconds=60)

#: A message is tried again after 2, 4, 8 … seconds, or when its receiver asks for it, later every hour, and is dead
#: after 16 tries, about five hours. By then a deploy may have corrected the cause; otherwise an operator notices the
#: same day. A try that could not reach the broker does not count.
MAX_ATTEMPTS = 16
LONGEST_BACKOFF = 3600  # seconds
#: Short, because trying an unreachable broker again costs almost nothing.
UNAVAILABLE_BACKOFF = timedelta(seconds=5)
NO_PAUSE = timedelta(0)

#: A statement leaves out at most so many paused topics of a sender, because SQLite limits its parameters. Messages to
#: earlier ones are taken and put back.
MAX_PAUSED = 400

#: A batch may contain a poison message that killed its relay. A message is sent alone after this many relays
#: disappeared while they had it.
SUSPICIOUS = 2

#: The last error of a message that died without an error of its sender.
DISAPPEARED = f"A relay disappeared while it had this message, {MAX_ATTEMPTS} times."

#: Cancels a statement with a bad plan. No statement waits for a locked message: locked messages are skipped.
STATEMENT_TIMEOUT = timedelta(seconds=30)


class Destination(NamedTuple):
    """What fails together: one topic of a sender, or, without a topic, everything that the sender sends."""

    sender: str
    topic: str | None = None

    def __str__(self) -> str:
        return f"Sender {self.sender}" if self.topic is None else f"Sender {self.sender}, topic {self.topic}"


class Pause(NamedTuple):
    """Why and for how long a destination gets no messages."""

    duration: timedelta
    error: str


@dataclass
class RelayResult(BatchResult):
    """The result of one batch, as counts of messages. Exhausted if nothing more can be sent now."""

    #: Confirmed by their broker, and not marked as sent before.
    sent: int = 0
    #: Their sender raised an error. They are tried again later.
    postponed: int = 0
    #: Their sender failed, or their relay died, too often. They wait to be requeued.
    dead: int = 0
    #: Not tried, because a broker can't be reached, a receiver is busy, or the relay's time was over.
    put_back: int = 0
    #: The paused destinations, with the error.
    paused: dict[Destination, str] = field(default_factory=dict)

    @property
    def touched(self) -> int:
        return self.sent + self.postponed + self.dead

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"paused": {str(place): error for place, error in self.paused.items()}}


def due(using: str) -> QuerySet[OutboxMessage]:
    """The messages that may be sent now, unordered."""
    messages = OutboxMessage.objects.using(using)
    free = Q(lease_expires_at=None) | Q(lease_expires_at__lte=Now())
    return messages.filter(free, status=MessageStatus.PENDING, next_try_at__lte=Now())


def relay_once(
    *, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None, paused: dict[Destination, Pause] | None = None
) -> RelayResult:
    """Send one batch, without the messages to ``paused`` destinations. Adds those that fail."""
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using, paused = using or outbox_database(), {} if paused is None else paused
    until = time.monotonic() + LEASE.total_seconds() / 2  # from here, because the lease begins later
    # If the process dies before the COMMIT, nothing was taken; after it, the lease runs out. If it freezes before the
    # COMMIT, the rows stay locked until the database ends the session, and other relays skip them.
    batch = in_transaction(using, lambda upkeep: _take(upkeep, batch_size, paused), statement_timeout=STATEMENT_TIMEOUT)
    fault_point["relay.claimed"]()
    result = RelayResult(exhausted=batch.exhausted)
    for messages in (batch.messages, batch.suspects):
        if messages:
            _settle(using, _send(messages, until, result, paused), result)
    for message in batch.dead:
        _announce_dead(message, result)
    if not result.touched and not result.paused:
        result.exhausted = True  # no message was tried, so the rest of this run would only put back again
    return result


def relay_batches(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> Iterator[RelayResult]:
    """Send due messages, longest due first, until nothing more is due. The caller may stop between batches.

    Relays may run concurrently and may be killed. Once a sender could not reach a destination, later batches leave its
    messages, so that they keep no others waiting.

    :param batch_size: the maximum number of messages in one batch, 1 to 500.
    :raises ValueError: the batch size is not between 1 and 500.
    :raises RuntimeError: a transaction is open.
    :raises DatabaseError: the database refuses. Messages that were sent but not marked are sent again.
    """
    paused: dict[Destination, Pause] = {}
    return in_batches(lambda: relay_once(batch_size=batch_size, using=using, paused=paused))


@dataclass
class _Batch:
    messages: list[OutboxMessage]
    #: At most one possible poison message. Sent after all others are marked, so that if the relay disappears, only this
    #: message can be the cause.
    suspects: list[OutboxMessage]
    #: Messages whose relays have disappeared too often.
    dead: list[OutboxMessage]
    exhausted: bool


def _take(upkeep: Upkeep, limit: int, paused: Iterable[Destination]) -> _Batch:
    using = upkeep.using
    ready = due(using).order_by("next_try_at", "pk")
    topics = defaultdict(list)
    for sender, topic in paused:
        topics[sender].append(topic)
    for sender, paused_topics in topics.items():
        ready = ready.exclude(
            Q(sender=sender) if None in paused_topics else Q(sender=sender, topic__in=paused_topics[-MAX_PAUSED:])
        )
    due_now = upkeep.select_unlocked(ready, limit)
    suspicious = [message for message in due_now if message.lease_expires_at and message.attempts >= SUSPICIOUS]
    dead = [message for message in suspicious if message.attempts >= MAX_ATTEMPTS]
    suspects = [message for message in suspicious if message.attempts < MAX_ATTEMPTS][:1]
    messages = [message for message in due_now if message not in suspicious]
    rows = OutboxMessage.objects.using(using)
    leased = rows.filter(pk__in=[message.pk for message in messages + suspects])
    leased.update(attempts=F("attempts") + 1, lease_expires_at=Now() + LEASE)
    rows.filter(pk__in=[message.pk for message in dead]).update(
        status=MessageStatus.DEAD, lease_expires_at=None, error=DISAPPEARED
    )
    for message in messages + suspects:
        message.attempts += 1
    return _Batch(messages, suspects, dead, exhausted=len(due_now) < limit and not suspicious)


@dataclass
class _Outcomes:
    confirmed: list[OutboxMessage] = field(default_factory=list)
    #: With the shortest pause and the error.
    failed: list[tuple[OutboxMessage, timedelta, str]] = field(default_factory=list)
    #: With the pause and the error; the error is empty if the relay's time was over.
    put_back: list[tuple[OutboxMessage, timedelta, str]] = field(default_factory=list)


def _send(
    messages: list[OutboxMessage], until: float, result: RelayResult, pauses: dict[Destination, Pause]
) -> _Outcomes:
    outcomes = _Outcomes()
    for message in messages:
        everything, topic = Destination(message.sender), Destination(message.sender, message.topic)
        pause = pauses.get(everything) or pauses.get(topic)
        if time.monotonic() >= until:
            outcomes.put_back.append((message, NO_PAUSE, ""))
            result.exhausted = False
        elif pause is not None:
            outcomes.put_back.append((message, *pause))
        else:
            try:
                _hand_over(message)
            except BrokerUnavailableError as error:
                place = everything if error.all_topics else topic
                logger.warning("%s can't be reached: %s", place, _trace_of(error))
                pauses[place] = pause = Pause(UNAVAILABLE_BACKOFF, reason_of(error))
                result.paused[place] = pause.error
                outcomes.put_back.append((message, *pause))
            except ReceiverBusyError as error:
                logger.warning("%s is busy: %s", topic, _trace_of(error))
                # A receiver may ask for any number of seconds.
                asked = timedelta(seconds=max(0, min(error.retry_after, LONGEST_BACKOFF)))
                pauses[topic] = pause = Pause(max(_backoff(message.attempts), asked), reason_of(error))
                result.paused[topic] = pause.error
                outcomes.failed.append((message, *pause))
            # A sender is the project's code and may raise anything. The other messages must still be sent.
            except Exception as error:  # noqa: BLE001
                logger.error("Message %s on %s was not sent: %s", message.message_id, message.topic, _trace_of(error))
                outcomes.failed.append((message, NO_PAUSE, reason_of(error)))
            else:
                fault_point["relay.published"]()
                outcomes.confirmed.append(message)
    return outcomes


def _backoff(attempts: int) -> timedelta:
    return timedelta(seconds=min(2**attempts, LONGEST_BACKOFF))


def _trace_of(error: Exception) -> str:
    """The error's class and stack for the log. Its text and its frames' variables may quote the payload."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()


def _hand_over(message: OutboxMessage) -> None:
    send: Callable[[OutboxMessage], None] = import_string(message.sender)
    with ExitStack() as stack:
        for each in extensions():
            if each.sending_context:
                stack.enter_context(each.sending_context(message))
        send(message)


def _settle(using: str, outcomes: _Outcomes, result: RelayResult) -> None:
    messages = OutboxMessage.objects.using(using)
    if outcomes.confirmed:
        # Not fenced: even if the relay was slow and lost its lease, the broker has the message.
        confirmed = messages.filter(pk__in=[message.pk for message in outcomes.confirmed])
        sent = confirmed.exclude(status=MessageStatus.SENT).update(
            status=MessageStatus.SENT, sent_at=Now(), lease_expires_at=None, error=""
        )
        fault_point["relay.marked"]()
        result.sent += sent
        signals.relayed.send_robust(sender=OutboxMessage, count=sent)
    # Fenced by the attempt number, because another relay may have taken or sent the message.
    mine = messages.filter(status=MessageStatus.PENDING)
    for (attempts, pause, error), failed in _alike(outcomes.failed).items():
        if attempts < MAX_ATTEMPTS:
            backoff = max(_backoff(attempts), pause)
            postponed = mine.filter(pk__in=[message.pk for message in failed], attempts=attempts)
            result.postponed += postponed.update(next_try_at=Now() + backoff, lease_expires_at=None, error=error)
            continue
        for message in failed:
            over = mine.filter(pk=message.pk, attempts=attempts)
            if over.update(status=MessageStatus.DEAD, lease_expires_at=None, error=error):
                _announce_dead(message, result)
    for (attempts, pause, error), put_back in _alike(outcomes.put_back).items():
        later: dict[str, Any] = {"next_try_at": Now() + pause, "error": error} if error else {}
        untried = mine.filter(pk__in=[message.pk for message in put_back], attempts=attempts)
        result.put_back += untried.update(attempts=F("attempts") - 1, lease_expires_at=None, **later)


def _alike(
    messages: list[tuple[OutboxMessage, timedelta, str]],
) -> dict[tuple[int, timedelta, str], list[OutboxMessage]]:
    """Group messages by attempts, pause and error. Most batches fail for one reason, so one statement is enough."""
    groups = defaultdict(list)
    for message, pause, error in messages:
        groups[message.attempts, pause, error].append(message)
    return groups


def _announce_dead(message: OutboxMessage, result: RelayResult) -> None:
    result.dead += 1
    logger.error("Message %s on %s is dead; its last error has the reason", message.message_id, message.topic)
    shown = {name: getattr(message, name) for name in ("account_id", "idempotency_key", "message_id", "topic")}
    signals.message_dead.send_robust(sender=OutboxMessage, attempt=message.attempts, **shown)
