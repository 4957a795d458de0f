"""A message: its identity and its history, as its headers record them, and how a message gets these headers.

A message keeps its headers when it is redelivered, retried or dead-lettered. So what must outlive one delivery is a
header. Headers are input from outside: another producer may have put any value there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery import current_task

from ...exceptions import RequestError
from ...identity import keys
from ...identity.scope import Scope, scope_of
from ...protocol.context import current_claim
from .policy import TaskPolicy

logger = logging.getLogger("idempotency")

#: The key under which a consumer claims the message. Without it the message's id is the key.
KEY_HEADER = "idempotency_key"
#: The account of the operation that published the message.
ACCOUNT_HEADER = "idempotency_account"

#: How many seconds the message has waited so far.
WAITED_HEADER = "idempotency_waited"
#: Attempts of the record that don't count as cut off: attempts that ended, and attempts before the message became a
#: dead letter.
ATTEMPTS_HEADER = "idempotency_attempts"
#: Whether a delivery of this message was cut off. The broker marks only the next delivery, so the header keeps the
#: mark.
REDELIVERED_HEADER = "idempotency_redelivered"

#: The account of a message that names none.
DEFAULT_ACCOUNT = "celery"


def headers_of(request: Any) -> dict[str, Any]:
    """The headers of a message, without Celery's own."""
    return dict(request.headers or {})


def scope_of_message(operation: str, request: Any, consumer: str | None) -> Scope:
    """The identity under which a message is consumed.

    :param operation: the name of the consumer's operation.
    :param request: the request of the running Celery task.
    :param consumer: a name that is used instead of the producer's account, or None.
    :raises KeyInvalidError: the key is not 1 to 255 visible ASCII characters.
    :raises AccountRequiredError: the account is empty, too long or not printable.
    """
    headers = headers_of(request)
    # A task keeps its id when it is redelivered or retried. If a publisher sends a message twice, both have the same
    # id.
    key = keys.validate_key(headers.get(KEY_HEADER, request.id))
    account = headers.get(ACCOUNT_HEADER, DEFAULT_ACCOUNT) if consumer is None else consumer
    return scope_of(operation, account if isinstance(account, str) else None, key)


def count_of(headers: Mapping[str, Any], name: str) -> int:
    """Read a number that this package keeps in a header. A value that it can't have written counts as 0."""
    value = headers.get(name, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def carry_on_identity(sender: str = "", headers: dict[str, Any] | None = None, **others: Any) -> None:
    """Give a task that a protected operation publishes a key that is derived from the operation's scope.

    So an operation that runs again publishes the same message again, and all messages that an operation leads to have
    one trace. A key that the caller has set is kept. This works with version 2 of Celery's message protocol, the
    default since 2016, because version 1 keeps its headers elsewhere.

    Nothing here may raise: if a receiver raises, Celery logs the error and publishes the message without a key.
    """
    claim = current_claim()
    if claim is None or headers is None or "id" not in headers:
        return
    running = current_task._get_current_object() if current_task else None
    if running is not None and running.request.id == headers["id"]:
        return  # self.retry() publishes the running task's own message again, which keeps its identity
    if KEY_HEADER not in headers:
        # Use the scope's derive_key(), because the claim's raises an error if the lease is lost.
        message_id = claim.scope.derive_key(claim.name_call(f"task:{sender}"))
        headers[KEY_HEADER] = claim.scope.key_for(message_id)
    headers.setdefault(ACCOUNT_HEADER, claim.scope.account_id)


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
        marked = (self.request.delivery_info or {}).get("redelivered")
        return bool(marked) or self.headers.get(REDELIVERED_HEADER) is True

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
