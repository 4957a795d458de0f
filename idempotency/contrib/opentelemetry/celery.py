"""Links the span of an idempotent task to the span that published its message."""

from __future__ import annotations

from typing import Any

from celery import current_task

from ... import signals
from ...operation import Operation
from ..celery.identity import headers_of
from ..celery.policy import policy_of
from .links import link_to_producer

#: Each delivery sends one of these first.
FIRST = (signals.claimed, signals.taken_over, signals.replayed, signals.conflicted, signals.key_reused)


def connect() -> None:
    """Link from now on. Called again, it does nothing."""
    for signal in FIRST:
        signal.connect(link, dispatch_uid="idempotency.opentelemetry.link")


def link(sender: Operation, **arguments: Any) -> None:
    task: Any = current_task._get_current_object() if current_task else None
    policy = policy_of(task)
    if policy is not None and policy.operation is sender:  # and not another operation that the task runs
        link_to_producer(headers_of(task.request))
