"""What a message costs in statements and transactions, from the outbox to the inbox."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from idempotency.models import OutboxMessage
from idempotency.outbox import publish
from idempotency.outbox.relay import relay_once
from testproject.models import Receipt, UnprotectedReceipt
from testproject.tasks import send_receipt, send_receipt_unprotected

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = re.compile(r'(?:FROM|INTO|UPDATE)\s+"?((?:idempotency|testproject)_\w+)')
TRANSACTIONS = {"BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE"}
POSTGRES = connection.vendor == "postgresql"

LOOK = ["SELECT idempotency_record"]
#: SQLite looks first, because an insert would wait for its one writer.
CLAIM = [*([] if POSTGRES else LOOK), "BEGIN", "INSERT idempotency_record", "COMMIT"]
LOST_CLAIM = [*CLAIM, *LOOK] if POSTGRES else LOOK
WORK = ["INSERT testproject_receipt"]
COMPLETE = ["UPDATE idempotency_record", "COMMIT"]


@contextmanager
def statements() -> Iterator[list[str]]:
    """What reaches the database in the block, in short; empty until the block has ended."""
    made: list[str] = []
    with CaptureQueriesContext(connection) as captured:
        yield made
    for query in captured.captured_queries:
        verb = query["sql"].split(maxsplit=1)[0].rstrip(";")
        table = TABLE.search(query["sql"])
        made.append(verb if verb in TRANSACTIONS or table is None else f"{verb} {table[1]}")


def hand_over(message: OutboxMessage) -> None:
    """A sender that is done at once: what a broker does costs the database nothing."""


SENDER = f"{__name__}.hand_over"


def publish_one(**options: str) -> None:
    publish("receipts", {"label": "one", "amount": 1}, sender=SENDER, **options)


def test_publishing_costs_one_statement_in_the_transaction_that_is_open() -> None:
    with transaction.atomic(), statements() as made:
        publish_one()

    insert = ["INSERT idempotency_outbox"]
    assert made == (insert if POSTGRES else ["SAVEPOINT", *insert, "RELEASE"])


@pytest.mark.parametrize("messages", [1, 100])
def test_a_batch_costs_the_relay_the_same_whatever_its_size(messages: int) -> None:
    with transaction.atomic():
        for _ in range(messages):
            publish_one()

    with statements() as made:
        result = relay_once(batch_size=100)

    bounds = ["SELECT"] if POSTGRES else []  # of locks and statements, for this transaction
    take = ["BEGIN", *bounds, "SELECT idempotency_outbox", "UPDATE idempotency_outbox", "COMMIT"]
    mark = ["UPDATE idempotency_outbox"]
    assert result.sent == messages
    assert made == [*take, *mark]


def test_a_protected_task_adds_the_claim_and_the_completing_update_to_its_own_statements() -> None:
    with statements() as bare:
        send_receipt_unprotected.apply(kwargs={"label": "bare", "amount": 1}, task_id=str(uuid4())).get()
    with statements() as made:
        send_receipt.apply(kwargs={"label": "kept", "amount": 1}, task_id=str(uuid4())).get()

    assert bare == ["INSERT testproject_unprotectedreceipt"]
    assert made == [*CLAIM, "BEGIN", *WORK, *COMPLETE]
    assert (Receipt.objects.count(), UnprotectedReceipt.objects.count()) == (1, 1)


def test_a_second_delivery_costs_the_look_at_the_record() -> None:
    task_id = str(uuid4())
    send_receipt.apply(kwargs={"label": "kept", "amount": 1}, task_id=task_id).get()

    with statements() as made:
        send_receipt.apply(kwargs={"label": "kept", "amount": 1}, task_id=task_id).get()

    assert made == LOST_CLAIM
    assert Receipt.objects.count() == 1
