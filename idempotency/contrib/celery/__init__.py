"""Celery: messages that are consumed once, sent by the outbox, and that carry on the identity of what led to them.

The public names. Importing this package connects its handlers to two of Celery's signals, and registers the system
checks of idempotent tasks.
"""

from __future__ import annotations

from typing import Any

try:
    from celery.signals import before_task_publish, task_failure, task_postrun, worker_process_shutdown
except ImportError as error:
    raise ImportError(
        "idempotency.contrib.celery needs Celery. Install it with\n"
        "    python -m pip install 'django-idempotency[celery]'"
    ) from error

from django.core.checks import register

from ...upkeep import erasure
from ...upkeep.counters import counters
from .checks import check_tasks
from .consuming import idempotent_task
from .dead_letters import redrive
from .deliveries import dead_letter_failed_message
from .identity import carry_on_identity
from .lost import resend_lost_messages
from .policy import consumers
from .publishing import CelerySender

__all__ = ["CelerySender", "idempotent_task", "redrive", "resend_lost_messages", "send"]

#: What the outbox hands its messages to, by default: the dotted path ``idempotency.contrib.celery.send``.
send = CelerySender()


def write_counts(sender: Any = None, **others: Any) -> None:
    """A worker has no requests after which its counts could be written. A task that is called eagerly has."""
    if not getattr(getattr(sender, "request", None), "is_eager", False):
        counters.flush_if_due()


def write_last_counts(**others: Any) -> None:
    """A worker's child ends without the interpreter's farewell, at which other processes write theirs."""
    counters.flush()


before_task_publish.connect(carry_on_identity, dispatch_uid="idempotency.carry_on_identity")
task_failure.connect(dead_letter_failed_message, dispatch_uid="idempotency.dead_letter_failed_message")
task_postrun.connect(write_counts, dispatch_uid="idempotency.write_counts")
worker_process_shutdown.connect(write_last_counts, dispatch_uid="idempotency.write_last_counts")
register(check_tasks, "idempotency")
erasure.consumer_finders.append(consumers)
