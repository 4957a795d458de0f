"""Deliveries that are not consumed: a message waits or becomes a dead letter. Dead letters can be redriven.

A message is always published again before it is acknowledged. If the process dies in between, there are two messages
with one identity, which take effect once.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, Final, NoReturn

from celery import current_app
from celery.exceptions import Ignore, Reject
from kombu.entity import Queue

from ... import foreign, signals
from ...conf import settings
from ...exceptions import BrokerUnavailableError, RequestError
from ...identity.keys import shorten
from ...identity.scope import Scope
from ...operation import Operation
from .messages import ATTEMPTS_HEADER, REDELIVERED_HEADER, WAITED_HEADER, count_of, headers_of, scope_of_message
from .policy import TaskPolicy, policy_of
from .publishing import BOUNDS, confirming_producer, publish_again

logger: Final = logging.getLogger("idempotency")

#: The header with the reason of a dead letter.
REASON_HEADER = "idempotency_dead_letter_reason"
MAX_REASON_LENGTH = 255

#: How long a message waits in total, unless its operation has a long lease. Waiting costs one message per
#: ``MAX_RETRY_AFTER``, giving up costs an operator's time, and most outages are over within an hour.
LONGEST_WAIT = timedelta(hours=1)


class _Refused(Ignore, Reject):  # type: ignore[misc]
    """Rejects the message. Also an ``Ignore``, so that ``autoretry_for=(Exception,)`` does not publish it again."""


def longest_wait(operation: Operation) -> timedelta:
    """How long a message of the operation waits in total: longer than any of its claims can stay live."""
    return max(LONGEST_WAIT, 2 * (operation.policy.lease + (operation.policy.heartbeat or timedelta(0))))


class Delivery:
    """One delivery of a message to an idempotent task, and how it can end without being consumed."""

    def __init__(self, policy: TaskPolicy, task: Any) -> None:
        self.policy = policy
        self.task = task
        self.request: Final = task.request
        self.headers: Final = headers_of(task.request)
        #: The number of the record's attempts that don't count as cut off.
        self._attempts = count_of(self.headers, ATTEMPTS_HEADER)
        #: Whether an earlier delivery was not acknowledged.
        marked = (self.request.delivery_info or {}).get("redelivered")
        self._is_redelivered = bool(marked) or self.headers.get(REDELIVERED_HEADER) is True

    @property
    def scope(self) -> Scope:
        """Raises the errors of ``scope_of_message``."""
        return scope_of_message(self.policy.operation.name, self.request, self.policy.consumer)

    def is_poison(self, attempt: int) -> bool:
        """Whether so many runs were cut off that this attempt must not run.

        The record counts all attempts, Celery the attempts that ended in a retry, and the message the attempts that
        ended otherwise. The rest were cut off, provided that the broker got no acknowledgement: otherwise they belong
        to another message with the same key. True at every multiple of ``max_attempts`` + 1, so that a rejected message
        that comes back has the same number of attempts again.

        :param attempt: the record's attempt number.
        """
        cut_off = attempt - self._attempts - int(self.request.retries)
        return self._is_redelivered and cut_off > 0 and cut_off % (self.policy.max_attempts + 1) == 0

    def log(self, level: int, event: str) -> None:
        try:
            trace = self.scope.trace
        except RequestError:
            trace = "unknown"  # the message has no valid identity
        logger.log(
            level,
            "Operation %r: message %s to task %s, trace %s, %s",
            self.policy.operation.name,
            shorten(str(self.request.id)),
            self.task.name,
            trace,
            event,
        )

    def wait(self, error: Exception, *, ended: int = 0) -> NoReturn:
        """Publish the message again, for later delivery. Celery does not count this as a retry of the task.

        :param error: why the message can't be consumed now.
        :param ended: the number of the record's attempts that this delivery used and ended.
        :raises Ignore: the message was published, so the worker acknowledges this delivery.
        :raises Reject: the broker can't be reached, or the message has waited too long.
        """
        if self.request.is_eager:
            raise error  # there is no message
        waited, reason = count_of(self.headers, WAITED_HEADER), str(error).partition("\n")[0]
        if waited >= longest_wait(self.policy.operation).total_seconds():
            self.dead_letter(f"waited for {waited} s: {reason}", error)
        longest = max(1, int(settings().max_retry_after.total_seconds()))
        # Each pause is half as long as all previous ones together, so that waiting messages don't overload the broker.
        countdown = min(max(1, getattr(error, "retry_after", None) or 0, waited // 2), longest)
        self.headers[WAITED_HEADER] = waited + countdown
        self.headers[ATTEMPTS_HEADER] = self._attempts + ended
        self.headers[REDELIVERED_HEADER] = self._is_redelivered
        self._publish_or_keep(countdown=countdown, retries=self.request.retries)
        self.log(logging.INFO, f"waits for {countdown} s: {reason}")
        raise Ignore(f"published again, for in {countdown} s: {reason}") from error

    def end_without_result(self, error: Exception) -> NoReturn:
        """End the delivery of a consumed message whose result is deleted.

        :raises Ignore: the worker acknowledges this delivery.
        """
        if self.request.is_eager:
            raise error  # the caller waits for a result
        reason = "has been consumed before, and its result is no longer kept"
        self.log(logging.INFO, reason)
        raise Ignore(reason)

    def dead_letter(self, reason: str, error: Exception | None = None, *, attempt: int = 0) -> NoReturn:
        """Move the message to the task's ``dead_letter`` queue. The task's result is not changed.

        Without such a queue the message is rejected: RabbitMQ moves it to its queue's dead-letter exchange, if any;
        other brokers drop it.

        :param attempt: the record's attempt number, if this delivery claimed it.
        :raises Ignore: the message was published, so the worker acknowledges this delivery.
        :raises Reject: there is no such queue, or the broker can't be reached.
        """
        if self.request.is_eager and error is not None:
            raise error
        if self.policy.dead_letter is None:
            self._announce_dead(reason, attempt)
            raise _Refused(reason, requeue=False) from error
        self._publish_or_keep(**self._to_dead_letters(reason, attempt))
        self._announce_dead(reason, attempt)
        raise Ignore(f"dead-lettered to {self.policy.dead_letter!r}: {reason}") from error

    def dead_letter_failed(self, reason: str) -> None:
        """Move the message of a finally failed task to its ``dead_letter`` queue."""
        attempt = getattr(self.request, "idempotency_attempt", 0)
        publish_again(self.task, self.request, headers=self.headers, **self._to_dead_letters(reason, attempt))
        self._announce_dead(reason, attempt)

    def _announce_dead(self, reason: str, attempt: int) -> None:
        queue, operation = self.policy.dead_letter, self.policy.operation
        fate = "is rejected" if queue is None else f"is dead-lettered to {queue!r}"
        self.log(logging.ERROR, f"{fate}: {reason}")
        try:
            scope = self.scope
        except RequestError:
            scope = Scope("", operation.name, "")
        message = {"message_id": str(self.request.id), "task": str(self.task.name), "reason": reason}
        signals.send(signals.dead_lettered, operation, scope, attempt, **message)

    def _to_dead_letters(self, reason: str, attempt: int) -> dict[str, Any]:
        for name in (WAITED_HEADER, REDELIVERED_HEADER):
            self.headers.pop(name, None)
        self.headers[REASON_HEADER] = reason[:MAX_REASON_LENGTH]
        self.headers[ATTEMPTS_HEADER] = attempt or self._attempts
        queue = self.policy.dead_letter
        # Name the default exchange, which overrides the task's route. Celery's retries start again at 0.
        return {"queue": queue, "exchange": "", "routing_key": queue, "retries": 0}

    def _publish_or_keep(self, **options: Any) -> None:
        try:
            publish_again(self.task, self.request, headers=self.headers, **options)
        except BrokerUnavailableError as lost:
            # Requeue the message. A broker that lost the connection does so anyway. Without acks_late, the message has
            # already been acknowledged and is lost.
            self.log(logging.ERROR, f"could not be published again: {lost}")
            raise _Refused(str(lost), requeue=True) from lost


def dead_letter_failed_message(sender: Any = None, task_id: str = "", exception: Any = None, **others: Any) -> None:
    """Receive Celery's ``task_failure``: the task failed and is not retried any more.

    Celery sends the signal before it acknowledges the message, in the process that ran the task or, if that died, in
    the worker's main process. If the broker can't be reached, Celery logs the error and can't acknowledge the message
    either, so it is delivered again.
    """
    policy = policy_of(sender)
    if policy is None or policy.dead_letter is None or isinstance(exception, (Ignore, Reject)):
        return  # a refused message has already been published again or rejected
    request = sender.request
    if request.id == task_id and not request.is_eager:
        # Celery wraps exceptions that it can't pickle.
        name = getattr(exception, foreign.EXCEPTION_NAME, type(exception).__name__)
        Delivery(policy, sender).dead_letter_failed(f"failed: {name}")


def redrive(queue: str, *, limit: int = 100, app: Any = None) -> int:
    """Publish the messages of a dead-letter queue again, oldest first, each to the queue of its task.

    They keep their identity, so a message that took effect does not take effect again. If the process dies, the
    remaining messages are still in the dead-letter queue, and one message may be in both queues.

    :param queue: the name given as ``dead_letter``, or a RabbitMQ dead-letter queue.
    :param limit: the maximum number of messages.
    :param app: the Celery app; by default the current one.
    :returns: the number of redriven messages.
    :raises BrokerUnavailableError: the broker can't be reached, or does not confirm.
    :raises Exception: there is no such queue. Each broker raises its own error.
    """
    app = app or foreign.behind_proxy(current_app)
    redriven = 0
    with confirming_producer(app) as producer:
        make: Any = Queue  # kombu has few type annotations
        source = make(queue, channel=producer.channel, no_declare=True)
        while redriven < limit and (message := source.get()) is not None:
            _publish_to_task(app, producer, message)
            message.ack()
            redriven += 1
    return redriven


def _publish_to_task(app: Any, producer: Any, message: Any) -> None:
    headers = {name: value for name, value in message.headers.items() if name != REASON_HEADER}
    route = foreign.route_of(app)({}, headers["task"], (), {})
    queue = route["queue"]
    properties = message.properties
    direct = queue.exchange.type == "direct"  # then publish directly to the queue, as Celery does
    producer.publish(
        message.body,
        exchange="" if direct else queue.exchange.name,
        routing_key=queue.name if direct else route.get("routing_key") or queue.routing_key,
        declare=[queue],
        headers=headers,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        **{name: properties[name] for name in ("correlation_id", "reply_to", "priority") if properties.get(name)},
        **BOUNDS,
    )
