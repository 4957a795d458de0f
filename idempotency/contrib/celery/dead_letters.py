"""Redrive: publish dead letters again, after the cause of their failure is corrected."""

from __future__ import annotations

from typing import Any

from celery import current_app
from kombu.entity import Queue

from .deliveries import REASON_HEADER
from .publishing import BOUNDS, confirming_producer


def redrive(queue: str, *, limit: int = 100, app: Any = None) -> int:
    """Publish the messages of a dead-letter queue again, oldest first, each to the queue of its task.

    The messages keep their ids, headers and arguments, and so their identity: one that has taken effect does not take
    effect again. If the process dies in the middle, the remaining messages are still in the dead-letter queue, and one
    message may be in both queues.

    :param queue: the name that was given as ``dead_letter``, or the name of a RabbitMQ dead-letter queue.
    :param limit: how many messages to redrive at most.
    :param app: the Celery app; by default the current one.
    :returns: how many messages were redriven.
    :raises BrokerUnavailableError: the broker can't be reached, or does not confirm.
    :raises Exception: there is no such queue. Each broker raises an error of its own.
    """
    app = app or current_app._get_current_object()
    redriven = 0
    with confirming_producer(app) as producer:
        make: Any = Queue  # kombu has few type annotations
        source = make(queue, channel=producer.channel, no_declare=True)
        while redriven < limit and (message := source.get()) is not None:
            _publish(app, producer, message)
            message.ack()
            redriven += 1
    return redriven


def _publish(app: Any, producer: Any, message: Any) -> None:
    headers = {name: value for name, value in message.headers.items() if name != REASON_HEADER}
    route = app.amqp.router.route({}, headers["task"], (), {})
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
        retry=BOUNDS["retry"],
        retry_policy=BOUNDS["retry_policy"],
        confirm_timeout=BOUNDS["confirm_timeout"],
    )
