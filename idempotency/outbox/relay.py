"""The relay: hand messages of the outbox to their brokers, one bounded batch at a time.

A batch is leased in a transaction of its own, then published outside of any, then marked. A relay that dies or freezes
anywhere leaves messages whose lease runs out, and the next one sends them, some for a second time: a broker's
confirmation and a commit can't be made one. So a message may be sent more than once, and always carries the same id.

Messages are found by status and due time. Never by an id that was reached: ids are given out before they are committed,
so a lower one may appear after a higher one was sent.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
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
from ..upkeep.batches import BatchResult, check_batch_size, in_batches

logger = logging.getLogger("idempotency")

#: Confirmed messages are marked together, so this is how many are sent again at most when a relay dies.
DEFAULT_BATCH_SIZE = 100
#: Two statements name every message of a batch, and SQLite may take no more than 999 parameters.
MAX_BATCH_SIZE = 500

#: How long a relay that has taken a batch is presumed alive. It stops sending when half of that has passed, so a sender
#: may take the other half for one message, and only a relay that froze sends what another one has taken over.
LEASE = timedelta(seconds=60)

#: A message is tried again after 2, 4, 8 … seconds and then every hour. After 16 tries, which is about five hours, it
#: is dead: what a person has to look at shouldn't wait for the next day, and what a deploy repairs is repaired by then.
#: A broker that can't be reached is not counted.
MAX_ATTEMPTS = 16
LONGEST_BACKOFF = 3600  # seconds
#: When a broker that could not be reached is tried again: soon, since nothing but the attempt is at stake.
UNAVAILABLE_BACKOFF = timedelta(seconds=5)

#: A relay that disappears may have done so because of one message of its batch: a poison message. Messages that were
#: left over from as many such batches are sent one at a time from then on.
SUSPICIOUS = 2

#: As much of an error as a person reads.
MAX_ERROR = 2000  # characters

#: A relay that freezes while it takes a batch holds its rows for no longer than this, and waits no longer for any.
IDLE_TIMEOUT = timedelta(seconds=5)
STATEMENT_TIMEOUT = timedelta(seconds=30)

#: A batch is taken again when the database refused it because of another relay (REPEATABLE READ, InnoDB).
_MAX_ROUNDS = 5


@dataclass
class RelayResult(BatchResult):
    """One batch of a relay, as counts of messages. It is exhausted if nothing more is due that can be sent now."""

    #: Confirmed by their broker, and not known to have been before.
    sent: int = 0
    #: Refused by their sender, to be tried again after a while.
    postponed: int = 0
    #: Refused once too often, or their relay died too often; they wait for somebody to requeue them.
    dead: int = 0
    #: Not tried: a broker can't be reached, a message before them in their order failed, or the time was up.
    put_back: int = 0
    #: The senders whose broker can't be reached, and the error.
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def touched(self) -> int:
        return self.sent + self.postponed + self.dead


def due(using: str) -> QuerySet[OutboxMessage]:
    """What may be sent now, in no order."""
    messages = OutboxMessage.objects.using(using)
    free = Q(lease_expires_at=None) | Q(lease_expires_at__lte=Now())
    # The conditions of the index that answers this, in its own words.
    earlier = messages.exclude(ordering_key="").exclude(status=MessageStatus.SENT)
    held_up = Exists(earlier.filter(ordering_key=OuterRef("ordering_key"), pk__lt=OuterRef("pk")))
    return messages.filter(free, Q(ordering_key="") | ~held_up, status=MessageStatus.PENDING, next_try_at__lte=Now())


def relay_once(
    *, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None, skip: Collection[str] = ()
) -> RelayResult:
    """Send up to ``batch_size`` messages that are due, those first that have been due longest.

    Safe to run many at once, and to kill. Not inside a transaction.

    :param using: the database of the outbox; by default the one that messages are written to.
    :param skip: senders to leave alone, because their broker is known not to be reachable.
    :raises ValueError: the batch size is not between 1 and 500.
    :raises DatabaseError: as the database does. What was sent and could not be marked is sent again.
    """
    check_batch_size(batch_size, MAX_BATCH_SIZE)
    using = using or router.db_for_write(OutboxMessage)
    until = time.monotonic() + LEASE.total_seconds() / 2  # from before the lease, which can only begin later
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

    A sender whose broker could not be reached is left alone in the batches that follow, so that it doesn't hold up the
    others. Raises what ``relay_once`` raises.
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
    #: At most one, which is sent after all else is marked: it alone answers for what happens then.
    suspects: list[OutboxMessage]
    #: Those whose relays have disappeared too often.
    dead: list[OutboxMessage]
    exhausted: bool


def _take(using: str, limit: int, skip: Collection[str]) -> _Batch:
    def transact() -> _Batch:
        # If the process dies before the COMMIT, nothing was taken. If it dies after it, the lease runs out. If it
        # freezes before it, the rows stay locked: other relays pass them over, and the database ends the session soon.
        with transaction.atomic(using=using, durable=True):
            sql.store(using).bound_transaction(idle=IDLE_TIMEOUT, statement=STATEMENT_TIMEOUT)
            return _take_in_transaction(using, limit, skip)

    return sql.retry_lost_races(_MAX_ROUNDS, using, transact)


def _take_in_transaction(using: str, limit: int, skip: Collection[str]) -> _Batch:
    ready = due(using).exclude(sender__in=list(skip)).order_by("next_try_at", "pk")
    if connections[using].features.has_select_for_update_skip_locked:
        ready = ready.select_for_update(skip_locked=True)
    found = list(ready[:limit])
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
    """What comes right behind the ordered messages among ``heads``. Nobody else can take it while they are unsent."""
    last = {message.ordering_key: message.pk for message in heads if message.ordering_key}
    if not last or limit < 1:
        return []
    free = Q(lease_expires_at=None) | Q(lease_expires_at__lte=Now(), attempts__lt=SUSPICIOUS)
    ready = free & Q(status=MessageStatus.PENDING, next_try_at__lte=Now())
    unsent = OutboxMessage.objects.using(using).exclude(ordering_key="").exclude(status=MessageStatus.SENT)
    behind = unsent.filter(ordering_key__in=last, pk__gt=min(last.values())).order_by("ordering_key", "pk")
    if connections[using].features.has_select_for_update:
        # A relay may be taking one of them this moment, if the head before it was committed after it. Not skipped: what
        # is behind a message that somebody else sends has to wait for it.
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
                send: Callable[[OutboxMessage], None] = import_string(message.sender)
                send(message)
            except BrokerUnavailableError as error:
                logger.warning("Sender %s can't reach its broker", message.sender, exc_info=True)
                result.unavailable[message.sender] = _text_of(error)
                outcomes.put_back.append((message, _text_of(error)))
            # A sender is the project's code and may raise anything, and one message is no reason to keep the others.
            except Exception as error:
                logger.exception("Message %s on %s was not sent", message.message_id, message.topic)
                outcomes.failed.append((message, _text_of(error)))
            else:
                fault_point("relay.published")
                outcomes.confirmed.append(message)
                continue
        if message.ordering_key:
            held_up.add(message.ordering_key)
    return outcomes


def _settle(using: str, outcomes: _Outcomes, result: RelayResult) -> None:
    messages = OutboxMessage.objects.using(using)
    if outcomes.confirmed:
        # Not fenced: a relay that was slow and lost its lease says what is true as well. The broker has the message.
        confirmed = messages.filter(pk__in=[message.pk for message in outcomes.confirmed])
        sent = confirmed.exclude(status=MessageStatus.SENT).update(
            status=MessageStatus.SENT, sent_at=Now(), lease_expires_at=None, error=""
        )
        fault_point("relay.marked")
        result.sent += sent
        signals.relayed.send_robust(sender=OutboxMessage, count=sent)
    # Everything else is fenced on the attempt: another relay may have the message by now, or may have sent it.
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
    """By what is said of them, since a batch that fails does so for one reason: a statement a reason, not a message."""
    groups = defaultdict(list)
    for message, error in messages:
        groups[message.attempts, error].append(message)
    return groups


def _text_of(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".replace("\x00", "\ufffd")  # which PostgreSQL's text can't hold
    return text.encode("utf-8", "replace").decode()[:MAX_ERROR]


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
