"""The workers' tasks: one protected task, and its control, a plain Celery task that does the same work.

An effect is a row in the database and a payout at the provider. Both tasks make both.
"""

from uuid import uuid4

from celery.signals import task_prerun
from django.conf import settings
from django.db import transaction

from idempotency import require_claim
from idempotency.contrib import celery
from idempotency.contrib.celery import idempotent_task
from testproject.celery import app
from testproject.harness.marks import Marks
from testproject.models import Transfer
from testproject.provider.client import pay
from tests.delivery.names import DEAD, KEPT, MAX_ATTEMPTS, PLAIN
from tests.harness.strikes import Strikes

DELIVERY = {"acks_late": True, "reject_on_worker_lost": True}

#: The strikes of this process.
strikes = Strikes(Marks(""))


@app.task(name=KEPT, **DELIVERY)
@idempotent_task(KEPT, dead_letter=DEAD, max_attempts=MAX_ATTEMPTS)
def kept(label: str, amount: int = 1) -> str:
    claim = require_claim()
    _take_effect(label, amount, str(claim.derive_key("payout")), f"attempt {claim.attempt}")
    return label


@app.task(name=PLAIN, **DELIVERY)
def plain(label: str, amount: int = 1) -> str:
    with transaction.atomic():
        _take_effect(label, amount, str(uuid4()), "")
    strikes.here("committed")
    return label


def _take_effect(label, amount, key, recipient):
    strikes.label = label
    strikes.here("begin")
    Transfer.objects.create(account_id=1, label=label, amount=amount, recipient=recipient)
    pay(settings.PROVIDER_URL, key, label=label, amount=amount, timeout=settings.PROVIDER_TIMEOUT)
    strikes.here("handler")


def count_deliveries():
    """Record each delivery that reaches a task, in any process."""

    @task_prerun.connect(weak=False)
    def note(kwargs=None, **others):
        strikes.label = ""
        strikes.marks.note("deliveries", (kwargs or {}).get("label", ""))


# Senders of the outbox besides the shipped one: one that publishes twice, and two that are broken


def send_twice(message):
    celery.send(message)
    celery.send(message)


def send_without_identity(message):
    """Give the message a new identity each time it is sent."""
    message.message_id = uuid4()
    message.idempotency_key = str(message.message_id)
    celery.send(message)


def send_most(message):
    """Report every third message as sent without sending it."""
    if message.pk % 3:
        celery.send(message)
