"""The message that a worker has at hand: its identity, and what has happened to it so far, as its headers say."""

from __future__ import annotations

import logging
from typing import Any

from ...exceptions import RequestError
from ...identity import keys
from ...identity.scope import Scope
from .identity import count_of, headers_of, scope_of_message
from .policy import TaskPolicy

logger = logging.getLogger("idempotency")

#: For how many seconds a message has waited so far, by its own account.
WAITED_HEADER = "idempotency_waited"
#: Attempts of the record that don't count as cut off: those before the message became a dead letter, and those that
#: ended.
ATTEMPTS_HEADER = "idempotency_attempts"
#: That a delivery of this message was cut off, as the broker says of the next delivery, and of that one only.
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
        """The identity of the message. Raises what ``scope_of_message`` raises."""
        return scope_of_message(self.policy.operation.name, self.request, self.policy.consumer)

    @property
    def waited(self) -> int:
        """For how many seconds it has waited so far."""
        return count_of(self.headers, WAITED_HEADER)

    @property
    def attempts(self) -> int:
        """Attempts of the record that don't count as cut off."""
        return count_of(self.headers, ATTEMPTS_HEADER)

    @property
    def redelivered(self) -> bool:
        """Whether the broker has delivered this message before, and got no answer."""
        told = (self.request.delivery_info or {}).get("redelivered")
        return bool(told) or self.headers.get(REDELIVERED_HEADER) is True

    def is_poison(self, attempt: int) -> bool:
        """Whether so many runs were cut off that this attempt is not to run.

        The record counts all its attempts, Celery those that ended in a retry, and the message those that ended
        otherwise. The others disappeared, if the broker got no answer either. (If it did, they were those of another
        message with the same key.) It says so at every ``max_attempts`` + 1 of them, so that a message that is rejected
        and comes back has as many tries again.
        """
        cut_off = attempt - self.attempts - int(self.request.retries)
        return self.redelivered and cut_off > 0 and cut_off % (self.policy.max_attempts + 1) == 0

    def log(self, level: int, what: str) -> None:
        """One line for one thing that happened to the message."""
        try:
            trace = self.scope.trace
        except RequestError:
            trace = "unknown"  # its identity is what is wrong with it
        logger.log(
            level,
            "Operation %r: message %s to task %s, trace %s, %s",
            self.policy.operation.name,
            keys.shorten(str(self.request.id)),
            self.task.name,
            trace,
            what,
        )
