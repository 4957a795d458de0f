"""System checks of idempotent tasks: what Celery's settings and an operation's policy say together.

They see the tasks that this process knows. A worker that starts knows all of its own, and runs Django's checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from celery import current_app
from django.apps import AppConfig
from django.core.checks import CheckMessage
from django.core.checks import Warning as CheckWarning

from ...checks import check_settings
from ...conf import settings
from .deliveries import patience
from .lost import LOOK_BACK
from .policy import TaskPolicy, idempotent_tasks

#: After this long without an acknowledgement another worker gets the message: what kombu's Redis transport does unless
#: ``visibility_timeout`` says otherwise, and RabbitMQ unless its ``consumer_timeout`` does.
VISIBILITY_TIMEOUT = timedelta(hours=1)
CONSUMER_TIMEOUT = timedelta(minutes=30)

#: The task that has lost messages sent again. By its name, because ``tasks`` is imported after this.
RESEND = "idempotency.tasks.resend_lost_messages"


def check_tasks(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """What each idempotent task declares, held against the broker that delivers to it. Nothing where a setting that it
    would be held by is wrong itself: that is said already."""
    if any(message.is_serious() for message in check_settings(app_configs)):
        return []
    app = current_app._get_current_object()
    return [message for task, policy in idempotent_tasks(app) for message in _check(app, task, policy)]


def _check(app: Any, task: Any, policy: TaskPolicy) -> Iterator[CheckMessage]:
    operation = policy.operation
    longest = longest_redelivery(app, task, policy)
    if operation.ttl <= longest:
        yield CheckWarning(
            f"Operation {operation.name!r} forgets a message after {operation.ttl}, and task {task.name!r} may get it "
            f"again after {longest}: it would then run a second time.",
            hint="Give the operation a longer ttl=, or shorten the broker's visibility_timeout.",
            id="idempotency.W004",
        )
    if operation.ttl > settings.ttl:
        yield CheckWarning(
            f"Operation {operation.name!r} remembers a message of task {task.name!r} for {operation.ttl}, and its "
            f"producer remembers its request for IDEMPOTENCY['TTL'], {settings.ttl}: the message of a new request "
            f"under an old key may be taken for the old one, and not run.",
            hint="Give the operation a ttl= that is not longer than IDEMPOTENCY['TTL'], or raise that.",
            id="idempotency.W007",
        )
    back = look_back(app)
    if back is not None and operation.ttl < back:
        yield CheckWarning(
            f"Operation {operation.name!r} forgets a message after {operation.ttl}, and resend_lost_messages looks "
            f"{back} back: lost messages of task {task.name!r} that are older than {operation.ttl} are not found.",
            hint="Give the operation a longer ttl=, or the task of the schedule a shorter look_back.",
            id="idempotency.W008",
        )
    limit = time_limit(app, task)
    alive = operation.lease + (operation.heartbeat or timedelta(0))
    if limit is not None and alive < limit:
        yield CheckWarning(
            f"Task {task.name!r} may run for {limit}, and a claim of operation {operation.name!r} is taken over after "
            f"{alive}: a slow run would be rolled back when it ends.",
            hint="Give the operation a longer lease=, or a heartbeat=, or the task a shorter time limit.",
            id="idempotency.W005",
        )
    if not (task.acks_late and task.reject_on_worker_lost):
        missing = "reject_on_worker_lost=True" if task.acks_late else "acks_late=True and reject_on_worker_lost=True"
        yield CheckWarning(
            f"The message of task {task.name!r} is lost when its worker is killed: there is no second delivery.",
            hint=f"Declare the task with {missing}. An idempotent task may be delivered again.",
            id="idempotency.W006",
        )


def longest_redelivery(app: Any, task: Any, policy: TaskPolicy) -> timedelta:
    """How late a message may come that has been consumed already."""
    scheme = app.connection_for_read().transport_cls
    if scheme in {"redis", "rediss", "sentinel", "sqs"}:
        seconds = app.conf.broker_transport_options.get("visibility_timeout", VISIBILITY_TIMEOUT.total_seconds())
        unacknowledged = timedelta(seconds=seconds)
    else:
        unacknowledged = CONSUMER_TIMEOUT
    countdowns = [
        task.default_retry_delay or 0,
        getattr(task, "retry_kwargs", {}).get("countdown", 0),
        getattr(task, "retry_backoff_max", 600) if getattr(task, "retry_backoff", False) else 0,
    ]
    return unacknowledged + timedelta(seconds=max(countdowns)) + patience(policy.operation)


def look_back(app: Any) -> timedelta | None:
    """How far back the beat's schedule has lost messages looked for. None if it doesn't."""
    entries = [entry for entry in app.conf.beat_schedule.values() if isinstance(entry, dict)]
    return max((_look_back_of(entry) for entry in entries if entry.get("task") == RESEND), default=None)


def _look_back_of(entry: dict[str, Any]) -> timedelta:
    args: Sequence[float] = entry.get("args") or ()
    kwargs = entry.get("kwargs") or {}
    seconds = args[1] if len(args) > 1 else kwargs.get("look_back", LOOK_BACK.total_seconds())
    return timedelta(seconds=seconds)


def time_limit(app: Any, task: Any) -> timedelta | None:
    """For how long Celery lets the task run: its hard limit, or else its soft one."""
    limits = (task.time_limit, app.conf.task_time_limit, task.soft_time_limit, app.conf.task_soft_time_limit)
    return next((timedelta(seconds=limit) for limit in limits if limit is not None), None)
