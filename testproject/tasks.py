"""The workers' tasks. Each takes effect once per message, in the transaction of its record.

``send_receipt_unprotected`` is the control: an ordinary task that does the same work.
"""

from typing import Any

from celery import shared_task

from idempotency.contrib.celery import idempotent_task

from .exports import TASK as EXPORT_TASK
from .exports import export_charges
from .models import Receipt, UnprotectedReceipt

#: The dead-letter queue, for messages that can't be consumed.
DEAD_LETTERS = "testproject.dead"

# If a worker is killed, its message is redelivered.
DELIVERY = {"acks_late": True, "reject_on_worker_lost": True}


@idempotent_task("receipts.send", dead_letter=DEAD_LETTERS)
def _send_receipt(label: str, amount: int) -> dict[str, Any]:
    return {"receipt": Receipt.objects.create(label=label, amount=amount).pk}


def _send_receipt_unprotected(label: str, amount: int) -> dict[str, Any]:
    return {"receipt": UnprotectedReceipt.objects.create(label=label, amount=amount).pk}


@idempotent_task("exports.run", dead_letter=DEAD_LETTERS)
def _run_export(export_id: str) -> dict[str, Any]:
    return export_charges(export_id)


# Not used as decorators, because Celery is untyped and the decorated functions would lose their types.
send_receipt = shared_task(name="testproject.tasks.send_receipt", **DELIVERY)(_send_receipt)
send_receipt_unprotected = shared_task(name="testproject.tasks.send_receipt_unprotected", **DELIVERY)(
    _send_receipt_unprotected
)
run_export = shared_task(name=EXPORT_TASK, **DELIVERY)(_run_export)
