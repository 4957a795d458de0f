"""The app: connects Celery's signals, registers the tasks and the system check."""

from typing import Any

from celery.signals import before_task_publish, task_failure, task_postrun, worker_process_shutdown
from django.apps import AppConfig
from django.core.checks import register
from django.utils.translation import gettext_lazy as _


class CeleryConfig(AppConfig):
    name = "idempotency.contrib.celery"
    label = "idempotency_celery"
    verbose_name: Any = _("Idempotency: Celery")

    def ready(self) -> None:
        # Imported here, because they need the models. Every process must register the tasks, because a COMMIT calls the
        # relay's task by name.
        from ... import extensions
        from . import tasks  # noqa: F401
        from .checks import check_tasks
        from .deliveries import dead_letter_failed_message
        from .messages import carry_on_identity
        from .policy import import_tasks

        before_task_publish.connect(carry_on_identity, dispatch_uid="idempotency.carry_on_identity")
        task_failure.connect(dead_letter_failed_message, dispatch_uid="idempotency.dead_letter_failed_message")
        task_postrun.connect(write_counts, dispatch_uid="idempotency.write_counts")
        worker_process_shutdown.connect(write_last_counts, dispatch_uid="idempotency.write_last_counts")
        register(check_tasks, "idempotency")
        extensions.register(self.name, extensions.Extension(import_operations=import_tasks))


def write_counts(sender: Any = None, **others: Any) -> None:
    """Write the counts of events after a task. After an eager call, the request writes them instead."""
    from ...operate import statistics

    if not getattr(getattr(sender, "request", None), "is_eager", False):
        statistics.write_counts(if_due=True)


def write_last_counts(**others: Any) -> None:
    """Write the last counts, because a worker's child process ends without running ``atexit`` handlers."""
    from ...operate import statistics

    statistics.write_counts()
