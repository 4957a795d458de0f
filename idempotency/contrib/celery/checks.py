"""System checks of idempotent tasks: whether Celery's settings match an operation's policy.

A worker runs Django's checks before it imports its tasks, and prints no result. A command imports the tasks instead.
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
from ...foreign import behind_proxy
from .deliveries import longest_wait
from .policy import TaskPolicy, idempotent_tasks

#: A message that is not acknowledged for this long goes to another worker. These are the defaults of
#: ``visibility_timeout`` in kombu's Redis transport and of ``consumer_timeout`` in RabbitMQ.
VISIBILITY_TIMEOUT = timedelta(hours=1)
CONSUMER_TIMEOUT = timedelta(minutes=30)


def check_tasks(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the declaration of each idempotent task against the settings of its broker.

    Checks nothing if ``IDEMPOTENCY`` is invalid: another check reports that.
    """
    if any(message.is_serious() for message in check_settings(app_configs)):  # which has imported the tasks
        return []
    app = behind_proxy(current_app)
    found = [message for task, policy in idempotent_tasks(app) for message in _check(app, task, policy)]
    return [*found, *_check_redeliveries(app)]


def _check_redeliveries(app: Any) -> Iterator[CheckMessage]:
    for task, policy in idempotent_tasks(app):
        name, retention = policy.operation.name, policy.operation.policy.retention
        try:
            longest = longest_redelivery(app, task, policy)
        except Exception as error:  # noqa: BLE001 - a transport may raise anything, and no check may stop migrate
            yield CheckWarning(
                f"When the broker redelivers messages is unknown, so idempotency.W004 was not checked. Its transport "
                f"can't be used: {error!r}.",
                hint="Install what the transport needs, for example by pip install 'celery[redis]', or correct the "
                "broker's settings.",
                id="idempotency.W028",
            )
            return
        if retention <= longest:
            yield CheckWarning(
                f"Operation {name!r} forgets a message after {retention}, but task {task.name!r} may get it again "
                f"after {longest} and would then run a second time.",
                hint="Give the operation a longer retention=, or shorten the broker's visibility_timeout.",
                id="idempotency.W004",
            )


def _check(app: Any, task: Any, policy: TaskPolicy) -> Iterator[CheckMessage]:
    operation = policy.operation
    in_force, project_retention = operation.policy, settings().defaults.retention
    if in_force.retention > project_retention:
        yield CheckWarning(
            f"Operation {operation.name!r} remembers a message of task {task.name!r} for {in_force.retention}, but its "
            f"producer remembers its request only for IDEMPOTENCY['RETENTION'], {project_retention}. The message of a "
            f"new request under an old key may be taken for the old message, and then it does not run.",
            hint="Give the operation a retention= that is not longer than IDEMPOTENCY['RETENTION'], or make that "
            "setting longer.",
            id="idempotency.W007",
        )
    limit = time_limit(app, task)
    alive = in_force.lease + (in_force.heartbeat or timedelta(0))
    if limit is not None and alive < limit:
        yield CheckWarning(
            f"Task {task.name!r} may run for {limit}, but a claim of operation {operation.name!r} can be taken over "
            f"after {alive}. A slow run would then be rolled back at its end.",
            hint="Give the operation a longer lease= or a heartbeat=, or give the task a shorter time limit.",
            id="idempotency.W005",
        )
    if not (task.acks_late and task.reject_on_worker_lost):
        missing = "reject_on_worker_lost=True" if task.acks_late else "acks_late=True and reject_on_worker_lost=True"
        yield CheckWarning(
            f"If a worker is killed, the message of task {task.name!r} is lost, because it is not delivered again.",
            hint=f"Declare the task with {missing}. An idempotent task may be delivered again.",
            id="idempotency.W006",
        )


def longest_redelivery(app: Any, task: Any, policy: TaskPolicy) -> timedelta:
    """The longest time after its consumption at which a message may be delivered again."""
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
    return unacknowledged + timedelta(seconds=max(countdowns)) + longest_wait(policy.operation)


def time_limit(app: Any, task: Any) -> timedelta | None:
    """The task's hard time limit, or else its soft one, or None."""
    limits = (task.time_limit, app.conf.task_time_limit, task.soft_time_limit, app.conf.task_soft_time_limit)
    return next((timedelta(seconds=limit) for limit in limits if limit is not None), None)
