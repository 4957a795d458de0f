"""What a message costs in statements and transactions, from the outbox to the inbox."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

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
