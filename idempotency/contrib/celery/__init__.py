"""Celery: tasks that take effect once for each message, messages sent by the outbox, and traces from task to task.

This module has the public names. Importing it connects handlers to four of Celery's signals, registers the system
checks of idempotent tasks, and tells the erasure under which names consumers record.
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

#: The default sender of the outbox, as the dotted path ``idempotency.contrib.celery.send``.
send = CelerySender()


def write_counts(sender: Any = None, **others: Any) -> None:
    """Write the counters after a task, because a worker has no requests after which they would be written.

    A task that is called eagerly runs inside a request, which writes them.
    """
    if not getattr(getattr(sender, "request", None), "is_eager", False):
        counters.flush_if_due()


def write_last_counts(**others: Any) -> None:
    """Write the last counts, because a worker's child process ends without running the ``atexit`` handlers."""
    counters.flush()


before_task_publish.connect(carry_on_identity, dispatch_uid="idempotency.carry_on_identity")
task_failure.connect(dead_letter_failed_message, dispatch_uid="idempotency.dead_letter_failed_message")
task_postrun.connect(write_counts, dispatch_uid="idempotency.write_counts")
worker_process_shutdown.connect(write_last_counts, dispatch_uid="idempotency.write_last_counts")
register(check_tasks, "idempotency")
erasure.consumer_finders.append(consumers)
