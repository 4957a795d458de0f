"""The page about publishing does what it says: its examples, its bounds, its tables."""

from __future__ import annotations

import http.client
import json
from types import SimpleNamespace
from typing import Any

import pytest

from idempotency.exceptions import BrokerUnavailableError
from idempotency.models import MessageStatus, OutboxMessage
from idempotency.outbox import publish, relay
from idempotency.outbox.relay import relay_once
from testproject.models import Charge
from tests.docs.conftest import RunPage, post
from tests.docs.pages import code, section, table, text_of
from tests.factories import UserFactory
from tests.outbox import broker, make_messages

PAGE = "how-to/publish-a-message.md"

# What the page shows is tested on each database elsewhere.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

TEXT = text_of(PAGE)


@pytest.fixture
def page(run_page: RunPage) -> Any:
    """All that the examples define."""
    return SimpleNamespace(**run_page(PAGE))


def deliveries() -> list[tuple[str, Any]]:
    return [(topic, payload) for _, topic, payload in broker.deliveries]


def test_the_view_publishes_once_however_often_it_is_asked(page: Any) -> None:
    user = UserFactory()
    assert [post(page.place_order, {}, user=user).status_code for _ in range(2)] == [201, 201]
    assert relay_once().sent == 1
    assert deliveries() == [("shop.tasks.ship", {"order_id": Charge.objects.get().pk})]


def test_the_other_examples_publish_what_they_say(page: Any) -> None:
    page.tell(7, ["a@example.com", "b@example.com"])
    page.ship_and_invoice(7)
    relay_once()
    assert deliveries() == [
        ("shop.tasks.notify", {"order_id": 7, "to": "a@example.com"}),
        ("shop.tasks.notify", {"order_id": 7, "to": "b@example.com"}),
        ("shop.tasks.ship", {"order_id": 7}),
        ("shop.tasks.invoice", {"order_id": 7}),
    ]


def test_the_alarms_ring(page: Any, run_page: RunPage) -> None:
    outbox_alarms = run_page("how-to/monitor.md")["outbox_alarms"]
    assert not any(outbox_alarms().values())
    make_messages(1, MessageStatus.DEAD)
    make_messages(1, due=-10 * relay.LEASE)
    assert outbox_alarms() == {
        "nobody relays": True,
        "somebody has to look": True,
        "more comes in than goes out": False,
    }
    page.requeue_all("orders.placed", by="a test")
    assert relay_once().sent == 2


class Host:
    """What the example of a sender connects to, in place of a host."""

    answer: int | Exception = 200
    asked: tuple[Any, ...] = ()

    def connect(self, host: str, timeout: float) -> Host:
        assert timeout < relay.LEASE.total_seconds() / 2
        return self

    def request(self, *asked: Any, **more: Any) -> None:
        self.asked = (*asked, more)

    def getresponse(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(status=self.answer)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (204, None),
        (503, BrokerUnavailableError),
        (429, BrokerUnavailableError),
        (ConnectionRefusedError(), BrokerUnavailableError),
        (http.client.BadStatusLine(""), BrokerUnavailableError),
        (404, ValueError),
        (302, ValueError),
    ],
)
def test_the_sender_tells_apart_what_is_at_fault(
    page: Any, monkeypatch: pytest.MonkeyPatch, answer: Any, raised: type[Exception] | None
) -> None:
    host = Host()
    host.answer = answer
    monkeypatch.setattr(http.client, "HTTPSConnection", host.connect)
    make_messages(1, headers={"Tenant": "a"})
    message = OutboxMessage.objects.get()
    if raised is None:
        page.send(message)
    else:
        with pytest.raises(raised):
            page.send(message)
    method, path, sent = host.asked
    assert (method, path, json.loads(sent["body"])) == ("POST", "/orders.placed", 0)
    assert sent["headers"]["Idempotency-Key"] == str(message.message_id)
    assert sent["headers"]["Tenant"] == "a"


def test_its_numbers_are_those_of_the_code() -> None:
    backoff = [min(2**attempt, relay.LONGEST_BACKOFF) for attempt in range(1, relay.MAX_ATTEMPTS)]
    assert 4.5 < sum(backoff) / 3600 < 5.5
    assert f"after {relay.MAX_ATTEMPTS} tries, some five hours" in TEXT
    assert relay.LONGEST_BACKOFF == 3600
    assert f"after {relay.UNAVAILABLE_BACKOFF.total_seconds():.0f} seconds" in TEXT
    assert f"lease of {relay.LEASE.total_seconds():.0f} seconds" in text_of("explanation/messages.md")
    assert f"{relay.DEFAULT_BATCH_SIZE} by default, up to {relay.MAX_BATCH_SIZE}" in text_of("reference/commands.md")


def test_every_argument_of_publish_is_listed() -> None:
    assert [code(row[0]) for row in table(section(PAGE, "`publish`"))] == [*publish.__annotations__][:-1]
