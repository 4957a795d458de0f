"""The tasks of the sample project's workers. Each takes effect once for each message, except for the controls.

``send_receipt`` writes a row in the transaction of its record. ``pay_fee`` calls the provider with a key derived from
the claim. The unprotected tasks are the controls: they do the same work as ordinary tasks, with the same settings.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery import shared_task
from django.conf import settings

from idempotency import REEXECUTE, current_claim
from idempotency.contrib.celery import idempotent_task

from .exports import TASK as EXPORT_TASK
from .exports import export_charges
from .models import Receipt, UnprotectedReceipt
from .provider.client import pay

#: The queue for dead letters: messages that can't be consumed.
DEAD_LETTERS = "testproject.dead"

#: The name of the call in its derived key.
CALL = "provider.fee"

# If a worker is killed, its message is delivered again.
DELIVERY = {"acks_late": True, "reject_on_worker_lost": True}


@idempotent_task("receipts.send", dead_letter=DEAD_LETTERS)
def _send_receipt(label: str, amount: int) -> dict[str, Any]:
    return {"receipt": Receipt.objects.create(label=label, amount=amount).pk}


def _send_receipt_unprotected(label: str, amount: int) -> dict[str, Any]:
    return {"receipt": UnprotectedReceipt.objects.create(label=label, amount=amount).pk}


@idempotent_task("fees.pay", dead_letter=DEAD_LETTERS, transaction=False, recovery=REEXECUTE)
def _pay_fee(label: str, amount: int) -> dict[str, Any]:
    claim = current_claim()
    assert claim is not None, "A direct call has no key for the provider."
    return _pay(settings.DEDUPLICATING_PROVIDER_URL, str(claim.derive_key(CALL)), label, amount)


def _pay_fee_unprotected(label: str, amount: int) -> dict[str, Any]:
    return _pay(settings.PROVIDER_URL, str(uuid4()), label, amount)


def _pay(provider: str, key: str, label: str, amount: int) -> dict[str, Any]:
    return {"payout": pay(provider, key, label=label, amount=amount, timeout=settings.PROVIDER_TIMEOUT).id}


@idempotent_task("exports.run", dead_letter=DEAD_LETTERS)
def _run_export(export_id: str) -> dict[str, Any]:
    return export_charges(export_id)


# Not written as decorators, because Celery has no types and the decorated functions would lose theirs.
send_receipt = shared_task(name="testproject.tasks.send_receipt", **DELIVERY)(_send_receipt)
send_receipt_unprotected = shared_task(name="testproject.tasks.send_receipt_unprotected", **DELIVERY)(
    _send_receipt_unprotected
)
pay_fee = shared_task(name="testproject.tasks.pay_fee", **DELIVERY)(_pay_fee)
pay_fee_unprotected = shared_task(name="testproject.tasks.pay_fee_unprotected", **DELIVERY)(_pay_fee_unprotected)
run_export = shared_task(name=EXPORT_TASK, **DELIVERY)(_run_export)
