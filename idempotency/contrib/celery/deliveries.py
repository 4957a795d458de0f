"""What becomes of a message that is not consumed now: it waits, or it becomes a dead letter.

A message is first published to where it goes and then acknowledged where it came from. If the process dies in between,
there are two of them, and both have one identity.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, NoReturn

from celery.exceptions import Ignore, Reject

from ...conf import settings
from ...exceptions import BrokerUnavailableError, IdempotencyError
from ...operation import Operation
from .messages import ATTEMPTS_HEADER, REDELIVERED_HEADER, WAITED_HEADER, Message
from .policy import policy_of
from .publishing import publish_again

#: Why a message is a dead letter.
REASON_HEADER = "idempotency_dead_letter_reason"
MAX_REASON_LENGTH = 255

#: A message waits for as long as this in all, and for longer where its operation's lease is long. To wait costs one
#: message in ``MAX_RETRY_AFTER``; to give up costs somebody's attention. Most outages are over within the hour.
PATIENCE = timedelta(hours=1)


class MessageRefused(Ignore, Reject):  # type: ignore[misc]
    """Tells the worker to reject the message.

    An ``Ignore`` as well, because ``autoretry_for`` lets that pass: Celery would otherwise publish a refused message
    again where a task is retried for every ``Exception``.
    """


def patience(operation: Operation) -> timedelta:
    """How long a message of an operation waits in all: for longer than any claim of it can be alive."""
    return max(PATIENCE, 2 * (operation.lease + (operation.heartbeat or timedelta(0))))


class Delivery(Message):
    """One delivery of a message, and the ways to end it without consuming the message."""

    def wait(self, error: IdempotencyError, *, ended: int = 0) -> NoReturn:
        """Publish the message again, for a little later, in place of this delivery of it.

        Neither counted as one of the task's own retries nor shown as one in its result. Each pause is half as long as
        all before it, so that many waiting messages don't keep a broker busy.

        :param ended: how many attempts of the record this delivery has used, and ended.
        :raises Ignore: done; the worker acknowledges this delivery.
        """
        if self.request.is_eager:
            raise error  # there is no message
        waited = self.waited
        if waited >= patience(self.policy.operation).total_seconds():
            self.dead_letter(f"waited for {waited} s: {error}", error)
        longest = max(1, int(settings.max_retry_after.total_seconds()))
        countdown = min(max(1, error.retry_after or 0, waited // 2), longest)
        self.headers[WAITED_HEADER] = waited + countdown
        self.headers[ATTEMPTS_HEADER] = self.attempts + ended
        self.headers[REDELIVERED_HEADER] = self.redelivered
        self._publish_or_keep(countdown=countdown, retries=self.request.retries)
        self.log(logging.INFO, f"waits for {countdown} s: {error}")
        raise Ignore(f"published again, for in {countdown} s: {error}") from error

    def dead_letter(self, reason: str, error: Exception | None = None, *, attempt: int = 0) -> NoReturn:
        """Take the message out of circulation, to where somebody can look at it. The task's result is not touched.

        To the task's ``dead_letter`` queue. Without one it is rejected: RabbitMQ hands a rejected message to the
        queue's dead-letter exchange, if it has one; other brokers drop it.

        :param attempt: the record's attempt by now, if this delivery has claimed it.
        :raises Ignore: done; the worker acknowledges this delivery.
        :raises MessageRefused: the worker rejects it.
        """
        if self.request.is_eager and error is not None:
            raise error
        if self.policy.dead_letter is None:
            self.log(logging.ERROR, f"is rejected: {reason}")
            raise MessageRefused(reason, requeue=False) from error
        self._publish_or_keep(**self._to_dead_letters(reason, attempt))
        self.log(logging.ERROR, f"is dead-lettered to {self.policy.dead_letter!r}: {reason}")
        raise Ignore(f"dead-lettered to {self.policy.dead_letter!r}: {reason}") from error

    def dead_letter_failed(self, reason: str) -> None:
        """The same for a task that has failed for good, whose failure goes its own way."""
        attempt = getattr(self.request, "idempotency_attempt", 0)
        self._publish_again(**self._to_dead_letters(reason, attempt))
        self.log(logging.ERROR, f"is dead-lettered to {self.policy.dead_letter!r}: {reason}")

    def _to_dead_letters(self, reason: str, attempt: int) -> dict[str, Any]:
        for name in (WAITED_HEADER, REDELIVERED_HEADER):
            self.headers.pop(name, None)
        self.headers[REASON_HEADER] = reason[:MAX_REASON_LENGTH]
        self.headers[ATTEMPTS_HEADER] = attempt or self.attempts
        queue = self.policy.dead_letter
        # The default exchange by name too, or a route of the task's would win. Celery's own retries begin anew.
        return {"queue": queue, "exchange": "", "routing_key": queue, "retries": 0}

    def _publish_or_keep(self, **options: Any) -> None:
        try:
            self._publish_again(**options)
        except BrokerUnavailableError as lost:
            # The broker is to deliver this one again, and does so by itself if the connection is gone. With acks_late
            # off it is acknowledged already, and lost.
            self.log(logging.ERROR, f"could not be published again: {lost}")
            raise MessageRefused(str(lost), requeue=True) from lost

    def _publish_again(self, **options: Any) -> None:
        publish_again(self.task, self.request, headers=self.headers, **options)


def dead_letter_failed_message(sender: Any = None, task_id: str = "", exception: Any = None, **others: Any) -> None:
    """Celery's ``task_failure``: a task has failed for good, its own retries included.

    Sent where the task ran, before its message is acknowledged; and by the worker's main process when the one where
    it ran is gone. If the broker can't be reached, Celery logs that, and can't acknowledge either: it is delivered
    again.
    """
    policy = policy_of(sender)
    if policy is None or policy.dead_letter is None or isinstance(exception, (Ignore, Reject)):
        return  # refused messages are somewhere already
    request = sender.request
    if request.id == task_id and not request.is_eager:
        name = getattr(exception, "exc_cls_name", type(exception).__name__)  # Celery wraps what it can't pickle
        Delivery(policy, sender).dead_letter_failed(f"failed: {name}")
