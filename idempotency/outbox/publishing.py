"""The outbox: a message is published if and only if the transaction that published it committed.

``publish`` writes the message in the caller's transaction. A relay (``relay.py``) hands it to a broker once that has
committed: at least once, and always with the same id, so that a consumer can tell a second delivery from a second
message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string
from django.utils.timezone import is_aware, make_naive

from .. import sql
from ..exceptions import MessageReusedError, NoTransactionError
from ..models import IdempotencyRecord, OutboxMessage, RecordQuerySet
from ..protocol.claim import Claim
from ..protocol.context import current_claim
from ..protocol.ownership import on_behalf_of

CELERY = "idempotency.contrib.celery.send"

MAX_LENGTH = 255  # of a topic, an ordering key and a sender's path, in characters

NOW = timedelta(0)

#: The senders that wait for a nudge, of each connection whose transaction published something.
_to_nudge: WeakKeyDictionary[BaseDatabaseWrapper, set[str]] = WeakKeyDictionary()


def alias() -> str:
    """The database that messages are written to, unless the caller names another."""
    return router.db_for_write(OutboxMessage)


def publish(
    topic: str,
    payload: object = None,
    *,
    name: str | None = None,
    headers: Mapping[str, str] | None = None,
    ordering_key: str = "",
    delay: timedelta | None = None,
    sender: str = CELERY,
    using: str | None = None,
) -> OutboxMessage:
    """Publish a message if, and only if, the open transaction commits. Costs one statement on a first attempt.

    Under a claim the message's id is derived from it, so an attempt that runs again publishes the same message and not
    a second one: in this order of calls, or by ``name``.

    :param topic: what it is about; for the Celery sender the task's name. 1 to 255 printable characters.
    :param payload: anything that JSON can hold. For the Celery sender an object is the task's keyword arguments, an
        array its arguments.
    :param name: tells this message from others of the operation on the same topic, however often and in whatever order
        they are published. Ignored outside of a claim.
    :param headers: go with the message.
    :param ordering_key: messages of one key are sent in the order in which they were written, each after the one before
        it is confirmed. A dead one holds up those behind it. Empty asks for no order.
    :param delay: how long to keep it back, at least.
    :param sender: dotted path of the callable that hands it to a broker.
    :param using: the database whose transaction is meant; by default the claim's, or that of the outbox.
    :returns: the message; the earlier one where an attempt before this one has published it.
    :raises NoTransactionError: there is no open transaction.
    :raises MessageReusedError: an attempt before this one has published another message in its place.
    :raises TypeError: the payload is not JSON, or a header is not text.
    :raises ValueError: a text is too long or has control characters, or the delay is negative.
    :raises ImportError: there is no such sender.
    """
    claim = current_claim()
    using = using or (alias() if claim is None else claim.using)
    with nullcontext() if claim is None else on_behalf_of(claim.ownership):
        _require_transaction(using, topic)
    if delay is not None and delay < NOW:
        raise ValueError(f"delay must not be negative, and is {delay}.")
    send: Callable[[OutboxMessage], None] = import_string(_text("sender", sender))
    message = OutboxMessage(
        topic=_text("topic", topic),
        payload=_json(payload, topic),
        headers=_checked_headers(headers or {}),
        ordering_key=_text("ordering_key", ordering_key) if ordering_key else "",
        sender=sender,
    )
    # If the process dies before the caller's COMMIT, nothing was published. If it dies after it, a relay finds the
    # message. If it sleeps before it until another attempt has taken the claim over, its completing update fails, and
    # the message is rolled back with it.
    if claim is None:
        message.message_id = uuid4()
        message.idempotency_key = str(message.message_id)
        sql.store(using).insert_message(message, delay or NOW)
    else:
        # The topic's length keeps a topic that ends like a count, or a name, from being taken for one.
        kind = f"outbox:{len(topic)}:{topic}"
        place = _Place(using, claim, claim.name_call(kind) if name is None else f"{kind}:{name}")
        with on_behalf_of(claim.ownership):
            message = place.publish(message, delay or NOW)
    if not delay:
        _nudge_on_commit(using, sender, send)
    return message


@dataclass(frozen=True)
class _Place:
    """One of the messages that an operation publishes, whichever attempt does: ``call`` says which.

    Its id is derived from the scope alone, so that it is the same even after a crash has lost the record. After the
    retention the same key makes a new request, and its message must have an id of its own, or a consumer that still
    remembers the old one would not run. The old message, which the outbox keeps for longer than consumers remember,
    tells that its id is taken; then the id is derived from the beginning of the new request, too.
    """

    using: str
    claim: Claim
    call: str

    def publish(self, message: OutboxMessage, delay: timedelta) -> OutboxMessage:
        """Insert the message, or return the one that this request has here already."""
        first = self.claim.derive_key(self.call)
        if self.claim.attempt > 1:
            # An attempt before this one may have found the first id taken, and the old message may be purged since.
            began = self._began()
            known = None if began is None else self._find(self._id_since(began))
            if known is not None:
                return _same(known, message)
        if self._insert(message, first, delay):
            return message
        known, began = self._find(first), self._began()
        if known is not None and (began is None or known.created_at >= began):
            return _same(known, message)
        new = first if began is None else self._id_since(began)
        if self._insert(message, new, delay):
            return message
        return _same(OutboxMessage.objects.using(self.using).get(message_id=new), message)

    def _began(self) -> datetime | None:
        """When the record's request began. A take-over leaves that as it is. None: the record is in another database,
        where a crash may lose it and not the message, so no time that it holds may decide about the message."""
        if self.using != self.claim.using:
            return None
        records = RecordQuerySet(IdempotencyRecord, using=self.using).in_scope(*astuple(self.claim.scope))
        return records.values_list("created_at", flat=True).first()

    def _id_since(self, began: datetime) -> UUID:
        # Without a time zone (USE_TZ = False) it is the same text on every server as it is.
        moment = make_naive(began, timezone.utc) if is_aware(began) else began
        return self.claim.derive_key(f"since {moment.isoformat()}: {self.call}")

    def _find(self, message_id: UUID) -> OutboxMessage | None:
        return OutboxMessage.objects.using(self.using).filter(message_id=message_id).first()

    def _insert(self, message: OutboxMessage, message_id: UUID, delay: timedelta) -> bool:
        scope = self.claim.scope
        message.message_id, message.account_id = message_id, scope.account_id
        message.idempotency_key = scope.key_for(message_id)
        return sql.store(self.using).insert_message(message, delay)


def _require_transaction(using: str, topic: str) -> None:
    if connections[using].in_atomic_block:
        try:
            with transaction.atomic(using=using, durable=True):
                pass  # only allowed directly inside the transaction that TestCase wraps a test in
        except RuntimeError:
            return
    raise NoTransactionError(
        f"A message on {topic!r} was published outside of a transaction of database {using!r}, so nothing would tie it "
        f"to what it tells of. Publish it inside transaction.atomic(using={using!r}), together with the writes."
    )


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}.")
    if not 0 < len(value) <= MAX_LENGTH or not value.isprintable():
        raise ValueError(f"{what} must be 1 to {MAX_LENGTH} printable characters, not {value!r}.")
    return value


def _json(payload: object, topic: str) -> str:
    try:
        return json.dumps(payload, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"The payload of a message on {topic!r} must be JSON: {error}") from error


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"A message's headers are text, not {name!r}: {value!r}.")
        if not name.isprintable() or not value.isprintable():
            raise ValueError(f"A message's headers are printable, unlike {name!r}: {value!r}.")
    return dict(headers)


def _same(before: OutboxMessage, message: OutboxMessage) -> OutboxMessage:
    """The message that the request has published before.

    :raises MessageReusedError: it is another one than it publishes now.
    """
    if (before.topic, _canonical(before.payload)) != (message.topic, _canonical(message.payload)):
        raise MessageReusedError(
            f"The operation has published message {before.message_id} before, with another payload or topic: it was "
            f"on {before.topic!r} and is on {message.topic!r}. Each attempt has to publish the same messages in the "
            f"same order, or give each a name= that says which it is."
        )
    return before


def _canonical(payload: str) -> str:
    return json.dumps(json.loads(payload), sort_keys=True)


def _nudge_on_commit(using: str, path: str, send: Any) -> None:
    """Tell the sender after COMMIT, once a transaction, that there is something to relay. Nothing depends on it."""
    nudge: Callable[[], None] | None = getattr(send, "nudge", None)
    if nudge is None:
        return
    waiting = _to_nudge.setdefault(connections[using], set())
    waiting.add(path)

    def nudge_once() -> None:
        # Registered for each message, because a savepoint that rolls back takes its callbacks along; the first one that
        # is left acts for all. What a transaction that rolled back has left in the set is used up by the next one.
        if path in waiting:
            waiting.discard(path)
            nudge()

    transaction.on_commit(nudge_once, using=using, robust=True)
