"""What a protected task costs in statements and transactions, beside the same task unprotected."""

from __future__ import annotations

from uuid import uuid4

import pytest

from testproject.models import Receipt, UnprotectedReceipt
from testproject.tasks import send_receipt, send_receipt_unprotected
from tests.http.test_cost import CLAIM, COMPLETE, LOST_CLAIM, statements

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_protected_task_adds_a_claim_and_an_update_and_a_second_delivery_costs_a_look() -> None:
    task_id = str(uuid4())
    with statements() as bare:
        send_receipt_unprotected.apply(kwargs={"label": "bare", "amount": 1}, task_id=task_id).get()
    with statements() as made:
        send_receipt.apply(kwargs={"label": "kept", "amount": 1}, task_id=task_id).get()
    with statements() as again:
        send_receipt.apply(kwargs={"label": "kept", "amount": 1}, task_id=task_id).get()
    assert bare == ["INSERT testproject_unprotectedreceipt"]
    assert made == [*CLAIM, "BEGIN", "INSERT testproject_receipt", *COMPLETE]
    assert again == LOST_CLAIM
    assert (Receipt.objects.count(), UnprotectedReceipt.objects.count()) == (1, 1)
