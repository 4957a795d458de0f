"""The orders of the sample project: their messages are published if and only if they are committed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from idempotency.contrib.celery import send
from idempotency.models import IdempotencyRecord, MessageStatus, OutboxMessage
from testproject.models import Charge, UnprotectedCharge
from testproject.orders import fee_of
from tests.concurrency.racing import race
from tests.factories import UserFactory
from tests.http.callers import Caller

# The sample adds nothing that depends on the database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

ORDER = {"amount": 1234, "label": "order-1"}


class Buyer(Caller):
    def order(self, path: str = "/orders/", key: str = "k", **changes: Any) -> Any:
        return self.post(path, {**ORDER, **changes}, key=key)


@pytest.fixture
def buyer(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Buyer:
    monkeypatch.setattr(send, "_quiet_until", float("inf"))  # no broker is looked for
    return Buyer(UserFactory())


def published() -> list[tuple[str, Any]]:
    assert set(OutboxMessage.objects.values_list("status", flat=True)) <= {MessageStatus.PENDING}
    messages = OutboxMessage.objects.order_by("pk").values_list("topic", "payload")
    return [(topic.rpartition(".")[2], json.loads(payload)) for topic, payload in messages]


def test_an_order_is_charged_and_leads_to_two_messages(buyer: Buyer) -> None:
    answer = buyer.order()
    charge = Charge.objects.get()
    assert (answer.status_code, answer.json()) == (201, {"id": charge.pk, **ORDER})
    assert published() == [("send_receipt", ORDER), ("pay_fee", {**ORDER, "amount": 12})]
    trace = IdempotencyRecord.objects.get().scope.trace
    assert {message.idempotency_key.partition(".")[0] for message in OutboxMessage.objects.all()} == {trace}


def test_however_often_it_is_sent_there_is_one_of_each(buyer: Buyer) -> None:
    answers = [*race([buyer.order] * 6), buyer.order()]
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert answers[-1]["Idempotency-Replayed"] == "true"
    assert (Charge.objects.count(), len(published())) == (1, 2)


def test_a_declined_order_leaves_nothing_and_is_replayed_as_that(buyer: Buyer) -> None:
    first, second = buyer.order(source="declined"), buyer.order(source="declined")
    assert (first.status_code, second.status_code, second["Idempotency-Replayed"]) == (402, 402, "true")
    assert first.content == second.content
    assert (Charge.objects.count(), published()) == (0, [])


def test_a_fee_is_never_nothing() -> None:
    assert [fee_of({"amount": amount, "label": ""})["amount"] for amount in (1, 99, 100, 250)] == [1, 1, 1, 2]


def test_without_a_broker_the_control_takes_no_orders(buyer: Buyer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://guest:guest@127.0.0.1:1//")
    assert buyer.order("/unprotected/orders/").status_code == 500
    assert UnprotectedCharge.objects.count() == 0
