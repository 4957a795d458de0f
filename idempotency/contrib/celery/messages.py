"""The message of a running task: its identity, and its history as its headers record it."""

from __future__ import annotations

import logging
from typing import Any

from ...exceptions import RequestError
from ...identity import keys
from ...identity.scope import Scope
from .identity import count_of, headers_of, scope_of_message
from .policy import TaskPolicy

logger = logging.getLogger("idempotency")

#: How many seconds the message has waited so far.
WAITED_HEADER = "idempotency_waited"
#: Attempts of the record that don't count as cut off: attempts that ended, and attempts before the message became a
#: dead letter.
ATTEMPTS_HEADER = "idempotency_attempts"
#: Whether a delivery of this message was cut off. The broker marks only the next delivery, so the header keeps the
#: mark.
REDELIVERED_HEADER = "idempotency_redelivered"


class Message:
    """A message to an idempotent task, as the running task sees it."""

    def __init__(self, policy: TaskPolicy, task: Any) -> None:
        self.policy = policy
        self.task = task
        self.request = task.request
        self.headers = headers_of(task.request)

    @property
    def scope(self) -> Scope:
        """The identity of the message. Raises the errors of ``scope_of_message``."""
        return scope_of_message(self.policy.operation.name, self.request, self.policy.consumer)

    @property
    def waited(self) -> int:
        """How many seconds the message has waited so far."""
        return count_of(self.headers, WAITED_HEADER)

    @property
    def attempts(self) -> int:
        """How many attempts of the record don't count as cut off."""
        return count_of(self.headers, ATTEMPTS_HEADER)

    @property
    def redelivered(self) -> bool:
        """Whether the broker has delivered this message before and got no acknowledgement."""
        told = (self.request.delivery_info or {}).get("redelivered")
        return bool(told) or self.headers.get(REDELIVERED_HEADER) is True

    def is_poison(self, attempt: int) -> bool:
        """Whether so many runs were cut off that this attempt must not run.

        The record counts all attempts. Celery counts those that ended in a retry, and the message those that ended in
        another way. The rest were cut off, provided that the broker got no acknowledgement. (If it got one, they were
        attempts of another message with the same key.) This is true at every multiple of ``max_attempts`` + 1, so that
        a message that was rejected and comes back has the same number of attempts again.

        :param attempt: the record's attempt number.
        """
        cut_off = attempt - self.attempts - int(self.request.retries)
        return self.redelivered and cut_off > 0 and cut_off % (self.policy.max_attempts + 1) == 0

    def log(self, level: int, what: str) -> None:
        """Log an event of this message."""
        try:
            trace = self.scope.trace
        except RequestError:
            trace = "unknown"  # the message has no valid identity
        logger.log(
            level,
            "Operation %r: message %s to task %s, trace %s, %s",
            self.policy.operation.name,
            keys.shorten(str(self.request.id)),
            self.task.name,
            trace,
            what,
        )
