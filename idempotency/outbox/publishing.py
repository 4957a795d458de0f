"""Publishing: a message is written in the caller's transaction.

After the COMMIT, a relay (``relay.py``) sends it to a broker at least once. The id is always the same, so that a
consumer can distinguish a second delivery from a second message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary

from django.db import IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string
from django.utils.timezone import is_aware, make_naive

from ..exceptions import MessageReusedError, NoTransactionError
from ..extensions import extensions
from ..identity import keys
from ..models import IdempotencyRecord, RecordQuerySet
from ..options import validators
from ..outcome import json_text
from ..protocol.claim import Claim
from ..protocol.context import current_claim
from ..protocol.ownership import on_behalf_of
from ..store import from_now, is_transaction_open, store_for
from .models import OutboxMessage, outbox_database

CELERY = "idempotency.contrib.celery.send"

NOW = timedelta(0)

# An existing message must not raise an error, which would break the caller's transaction. It is a normal case: the
# attempt after one that was cut off finds its messages.
_INSERT = """
INSERT INTO idempotency_outbox_message (message_id, account_id, idempotency_key, topic, sender, payload, headers,
    status, attempts, error, next_try_at)
VALUES (%s, %s, %s, %s, %s, %s::json, %s::jsonb, 'pending', 0, '', statement_timestamp() + %s)
ON CONFLICT (message_id) DO NOTHING
RETURNING id, created_at, next_try_at
"""

#: The senders to nudge after the COMMIT, by connection.
_to_nudge: WeakKeyDictionary[BaseDatabaseWrapper, set[str]] = WeakKeyDictionary()


def publish(
    topic: str,
    payload: object = None,
    *,
    name: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    sender: str = CELERY,
    using: str | None = None,
) -> OutboxMessage:
    """Publish a message if, and only if, the open transaction commits. Costs one statement on a first attempt.

    Under a claim, the message's id is derived from the claim, so that an operation that runs again publishes the same
    message. Messages on one topic differ by ``name``, or else by the order of the calls.

    :param topic: 1 to 255 printable characters; for the Celery sender, the name of the task.
    :param payload: JSON data. For the Celery sender, an object has the task's keyword arguments, and an array its
        positional arguments.
    :param name: distinguishes the operation's messages on one topic, so that their number and order don't matter.
        Ignored outside a claim.
    :param headers: text sent with the message.
    :param delay: the minimum time until the message is sent.
    :param sender: the dotted path of the callable that sends the message.
    :param using: the alias of the transaction's database; by default the claim's, or else the outbox's.
    :returns: the message, or the message that an earlier attempt published.
    :raises NoTransactionError: no transaction is open.
    :raises MessageReusedError: an earlier attempt published a different message at this point.
    :raises LeaseLostError: the claim's lease is known to be lost.
    :raises TypeError: the payload is not JSON, a text is not a str, or the delay is not a timedelta.
    :raises ValueError: a text is empty, too long or not printable, the delay is negative or longer than 36,500 days, or
        the headers contain ``Idempotency-Key``.
    :raises ImportError: the sender can't be imported.
    """
    claim = current_claim()
    using = using or (outbox_database() if claim is None else claim.using)
    with nullcontext() if claim is None else on_behalf_of(claim.ownership):
        if not is_transaction_open(using):
            raise NoTransactionError(
                f"A message on {topic!r} was published outside a transaction of database {using!r}, so it could be "
                f"sent without the writes that it reports. Publish it inside transaction.atomic(using={using!r}), "
                f"together with the writes."
            )
    if delay is not None and not isinstance(delay, timedelta):
        raise TypeError(f"delay must be a timedelta, not {type(delay).__name__}.")
    if delay is not None and not NOW <= delay <= validators.MAX_DURATION:
        raise ValueError(f"delay must be 0 to {validators.MAX_DURATION.days} days, not {delay}.")
    send: Callable[[OutboxMessage], None] = import_string(_text("sender", sender))
    sources = [each.message_headers for each in extensions() if each.message_headers]
    message = OutboxMessage(
        topic=_text("topic", topic),
        payload=json_text(payload, f"The payload of a message on {topic!r} must be JSON"),
        headers={name: text for source in sources for name, text in source().items()} | _checked_headers(headers or {}),
        sender=sender,
    )
    # If the process dies before the caller's COMMIT, nothing was published; after it, a relay finds the message. If it
    # sleeps before the COMMIT until another attempt takes over, its completing update matches no row, and the message
    # is rolled back.
    if claim is None:
        message.message_id = uuid4()
        message.idempotency_key = str(message.message_id)
        insert_message(using, message, delay or NOW)
    else:
        # The length delimits the topic, so that a topic that ends like a count or a name is not mistaken for a shorter
        # topic with that count or name.
        kind = f"outbox:{len(topic)}:{topic}"
        place = _Place(using, claim, claim.name_call(kind) if name is None else f"{kind}:{name}")
        with on_behalf_of(claim.ownership):
            message = place.publish(message, delay or NOW)
    if not delay:
        _nudge_on_commit(using, sender, send)
    return message


@dataclass(frozen=True)
class _Place:
    """The place of one message among an operation's messages. ``call`` names it and is the same in every attempt.

    The message's id is derived from the scope alone, so that it is the same even if a crash lost the record. After the
    retention, the same key starts a new request, whose message needs a different id, because a consumer that remembers
    the old id would not run. So if the outbox still has the old message, the new id is also derived from the time at
    which the new request began. The outbox keeps messages for longer than consumers remember them.
    """

    using: str
    claim: Claim
    call: str

    def publish(self, message: OutboxMessage, delay: timedelta) -> OutboxMessage:
        """Insert the message, or return the message that this request already published in this place."""
        first = self.claim.derive_key(self.call)
        messages = OutboxMessage.objects.using(self.using)
        if self.claim.attempt > 1 and (began := self._began()) is not None:
            # An earlier attempt of this request may have found the first id taken, and the old message may have been
            # purged since. So look for the second id first.
            published = messages.filter(message_id=self._id_since(began)).first()
            if published is not None:
                return _same(published, message)
        if self._insert(message, first, delay):
            return message
        published, began = messages.filter(message_id=first).first(), self._began()
        if published is not None and (began is None or published.created_at >= began):
            return _same(published, message)
        new = first if began is None else self._id_since(began)
        if self._insert(message, new, delay):
            return message
        return _same(messages.get(message_id=new), message)

    def _began(self) -> datetime | None:
        """When the request began, according to the record. A take-over does not change that time."""
        # A crash may lose a record in another database but keep the message, so its times must not decide.
        if self.using != self.claim.using:
            return None
        records = RecordQuerySet(IdempotencyRecord, using=self.using).in_scope(*astuple(self.claim.scope))
        return records.values_list("created_at", flat=True).first()

    def _id_since(self, began: datetime) -> UUID:
        # Every server must derive the same text. A naive time (USE_TZ = False) is the same on every server.
        moment = make_naive(began, UTC) if is_aware(began) else began
        return self.claim.derive_key(f"since {moment.isoformat()}: {self.call}")

    def _insert(self, message: OutboxMessage, message_id: UUID, delay: timedelta) -> bool:
        scope = self.claim.scope
        message.message_id, message.account_id = message_id, scope.account_id
        message.idempotency_key = scope.key_for(message_id)
        return insert_message(self.using, message, delay)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}.")
    if problem := validators.name(value):
        raise ValueError(f"{what} {problem}, not {value!r}.")
    return value


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"The names and values of a message's headers must be str. {name!r} is not.")
        if not name.isprintable() or not value.isprintable():
            raise ValueError(f"The headers of a message must be printable. {name!r} is not.")
        if name.lower() == keys.HEADER.lower():
            raise ValueError(
                f"The headers of a message must not contain {name!r}, because each message has its own key."
            )
    return dict(headers)


def _same(before: OutboxMessage, message: OutboxMessage) -> OutboxMessage:
    """:raises MessageReusedError: the earlier attempt's message differs."""
    contents = [(each.topic, json.dumps(json.loads(each.payload), sort_keys=True)) for each in (before, message)]
    if contents[0] != contents[1]:
        raise MessageReusedError(
            f"An earlier attempt published a different message {before.message_id} on {before.topic!r} instead of "
            f"this one on {message.topic!r}. Each attempt must publish the same messages in the same order, or give "
            f"each message a separate name=."
        )
    return before


def _nudge_on_commit(using: str, path: str, send: Any) -> None:
    """Nudge the sender after the COMMIT, once per transaction. A lost nudge only delays the message."""
    nudge: Callable[[], None] | None = getattr(send, "nudge", None)
    if nudge is None:
        return
    waiting = _to_nudge.setdefault(connections[using], set())
    waiting.add(path)

    def nudge_once() -> None:
        # Each message registers a callback, because a savepoint that rolls back discards its callbacks. The first
        # remaining one nudges for all. If the whole transaction rolls back, its entry is used by the next transaction.
        if path in waiting:
            waiting.discard(path)
            nudge()

    transaction.on_commit(nudge_once, using=using, robust=True)


def insert_message(using: str, message: OutboxMessage, delay: timedelta) -> bool:
    """Insert the message, and set the values generated by the database. The caller's transaction stays usable.

    :param delay: the time from now until the message is due.
    :returns: False if a message with its id already exists.
    """
    if connections[using].vendor != "postgresql":
        return _save(using, message, delay)
    scope = (message.message_id, message.account_id, message.idempotency_key)
    content = (message.topic, message.sender, message.payload, json.dumps(message.headers))
    row = store_for(using).row_of(_INSERT, (*scope, *content, delay))
    if row is None:
        return False
    message.pk, message.created_at, message.next_try_at = row
    return True


def _save(using: str, message: OutboxMessage, delay: timedelta) -> bool:
    if delay:
        message.next_try_at = from_now(delay)
    try:
        with transaction.atomic(using=using):  # a savepoint, so that an error leaves the transaction usable
            message.save(using=using)
    except IntegrityError as error:
        if not store_for(using).is_duplicate(error):
            raise
        return False
    if delay:
        message.refresh_from_db(using=using)
    return True
