"""An inspectable broker for the outbox's tests, and messages in every state.

Real brokers are in the tests of ``contrib/celery``. With this one, tests check which messages a relay sends, in which
order and how often, and how it treats each answer.
"""

import itertools
import json
from datetime import timedelta
from uuid import uuid4

from idempotency.exceptions import BrokerUnavailableError
from idempotency.outbox.models import MessageStatus, OutboxMessage
from tests.records import database_now, from_now

SENDER = "tests.outbox.broker"
OTHER_SENDER = "tests.outbox.other_broker"
PLAIN_SENDER = "tests.outbox.send_plainly"

BROKEN = ConnectionError("no route")
UNREACHABLE = BrokerUnavailableError("no route")
ALL_UNREACHABLE = BrokerUnavailableError("no route", all_topics=True)

_numbers = itertools.count()


class Broker:
    """A sender that remembers its messages. ``answer`` is called first, and refuses by raising."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.deliveries = []
        self.nudges = 0
        self.answer = lambda message: None
        self.on_nudge = lambda: None

    def __call__(self, message):
        self.answer(message)
        self.deliveries.append((message.message_id, message.topic, json.loads(message.payload)))

    def nudge(self):
        self.nudges += 1
        self.on_nudge()

    @property
    def payloads(self):
        return [payload for _, _, payload in self.deliveries]

    @property
    def ids(self):
        return [message_id for message_id, _, _ in self.deliveries]

    def refuse(self, *payloads, error):
        """Refuse messages with these payloads, and accept all others."""

        def answer(message):
            if json.loads(message.payload) in payloads:
                raise error

        self.answer = answer


broker = Broker()
other_broker = Broker()


def send_plainly(message):
    """A sender that is a function, so it can't be nudged."""
    broker(message)


def make_messages(count=1, status=MessageStatus.PENDING, *, due=-timedelta(seconds=1), lease=None, sent=None, **fields):
    """Insert messages and return their ids. Payloads count up from 0. Times are relative to the database's clock."""
    now = database_now()
    values = {
        "topic": "orders.placed",
        "sender": SENDER,
        "next_try_at": now + due,
        "lease_expires_at": None if lease is None else now + lease,
        "sent_at": None if sent is None else now + sent,
        "status": status,
        **fields,
    }
    made = OutboxMessage.objects.bulk_create(
        OutboxMessage(
            message_id=uuid4(), idempotency_key=f"message-{next(_numbers)}", **{"payload": json.dumps(number), **values}
        )
        for number in range(count)
    )
    return [message.pk for message in made]


def statuses():
    """The state and attempts of every message, in the order of their ids."""
    return list(OutboxMessage.objects.order_by("pk").values_list("status", "attempts"))


def make_due():
    """Make every pending message due, and end its lease."""
    waiting = OutboxMessage.objects.filter(status=MessageStatus.PENDING)
    waiting.update(next_try_at=from_now(-timedelta(seconds=1)))
    waiting.exclude(lease_expires_at=None).update(lease_expires_at=from_now(-timedelta(seconds=1)))
