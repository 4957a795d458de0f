"""Publishing to Celery's broker: confirmed, bounded in time, and through connections of this process's own.

Celery's own pool serves requests and follows the project's settings, which by default neither ask RabbitMQ for
confirms nor bound how long a broker that doesn't answer is waited for. A relay must know that a message has arrived
before it marks it as sent, and a worker before it acknowledges the one that it came from.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from amqp.exceptions import AccessRefused, NotAllowed
from celery import current_app
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.pools import ProducerPool

from ...exceptions import BrokerUnavailableError
from ...models import OutboxMessage
from .identity import ACCOUNT_HEADER, KEY_HEADER

logger = logging.getLogger("idempotency")

#: Seconds. A broker that is well answers in milliseconds; one that has blocked its publishers, as RabbitMQ does when
#: memory or disk run low, answers when somebody has tidied up.
CONFIRM_TIMEOUT = 10.0

#: How a lost connection is come back from: at once, because the usual one was closed while it lay idle in the pool.
RETRY_POLICY: Mapping[str, Any] = {"max_retries": 2, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}

BOUNDS: Mapping[str, Any] = {
    "retry": True,
    "retry_policy": RETRY_POLICY,
    "confirm_timeout": CONFIRM_TIMEOUT,
    "add_to_parent": False,
}

#: Without these kombu's first connection is tried for much longer, or for ever, depending on its version.
CONNECT_BOUNDS: Mapping[str, Any] = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.1, "interval_max": 0.1}

#: Redis has no bound of its own.
SOCKET_TIMEOUTS: Mapping[str, Any] = {"socket_connect_timeout": 4.0, "socket_timeout": CONFIRM_TIMEOUT}

#: The task that a nudge asks for. It is named here, and not imported, because the tasks use this package.
RELAY_TASK = "idempotency.tasks.relay_outbox"

#: Seconds for which nobody is nudged after the broker could not be reached. Relays come by themselves, and a request
#: must not pay for a connection that fails, over and over.
QUIET = 30.0

#: Seconds. A nudge that has lain in the queue for longer asks for what other nudges have seen to.
NUDGE_EXPIRES = 30.0

_pools: dict[tuple[Any, ...], Any] = {}


@contextmanager
def confirming_producer(app: Any) -> Iterator[Any]:
    """A producer whose ``publish`` returns when the broker has the message.

    :raises BrokerUnavailableError: the broker can't be reached, or does not confirm.
    """
    try:
        with _pool(app).acquire(block=True, timeout=CONFIRM_TIMEOUT) as producer:
            yield producer
    except (OperationalError, LimitExceeded, AccessRefused, NotAllowed) as error:
        # The last two are RabbitMQ's words for a wrong password or virtual host, which is no message's fault.
        raise BrokerUnavailableError(f"The broker can't be reached: {error}") from error


def _pool(app: Any) -> Any:
    conf = app.conf
    # A forked process has a copy of its parent's connections, and must not talk on them. They are left alone: closing
    # one would say good-bye on the parent's socket.
    place = (os.getpid(), app, repr(conf.broker_write_url), repr(conf.broker_transport_options))
    pool = _pools.get(place)
    return _pools.setdefault(place, _make_pool(app)) if pool is None else pool


def _make_pool(app: Any) -> Any:
    connection = app.connection_for_write(transport_options=CONNECT_BOUNDS)
    options = connection.transport_options
    if connection.transport.driver_type == "amqp":
        options["confirm_publish"] = True
    elif connection.transport.driver_type == "redis":
        options.update({name: options.get(name, value) for name, value in SOCKET_TIMEOUTS.items()})
    limit = app.conf.broker_pool_limit
    make: Any = ProducerPool  # kombu's types are few
    return make(connection.Pool(limit=limit), limit=limit)


def publish(app: Any, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> None:
    """Publish a task by its name, and as it is declared if it is in this process.

    Dies before the broker has it: the caller has not gone on, and publishes again. Dies after, or the confirm is lost:
    the caller publishes the same id again, and the consumer tells by it.

    :raises BrokerUnavailableError: the broker can't be reached, or does not confirm.
    :raises TypeError: the arguments are not what the task takes.
    :raises NotRegistered: tasks are eager, and no module that Celery discovers declares this one.
    """
    if app.conf.task_always_eager:
        if name not in app.tasks:
            # Autodiscovery imports an app's tasks when a worker starts, and this process may be none. Without the task
            # its message would go to a broker that nobody reads, and count as sent.
            app.loader.import_default_modules()
        app.tasks[name].apply_async(args, kwargs, **options)
        return
    task = app.tasks.get(name)
    send = functools.partial(app.send_task, name) if task is None else task.apply_async
    with confirming_producer(app) as producer:
        send(args, kwargs, producer=producer, **BOUNDS, **options)


def publish_again(task: Any, request: Any, **changes: Any) -> None:
    """Publish the message of a running task, as Celery's own ``retry`` does: with its id, arguments, callbacks, chain,
    chord, expiry and time limits. By its name, so that arguments which the task doesn't take are no obstacle.

    :raises BrokerUnavailableError: the broker can't be reached, or does not confirm.
    """
    same = task.signature_from_request(request, **changes)
    options = {"serializer": task.serializer, "compression": getattr(task, "compression", None)} | same.options
    with confirming_producer(task.app) as producer:
        task.app.send_task(task.name, same.args, same.kwargs, producer=producer, **BOUNDS, **options)


class CelerySender:
    """Hands the outbox's messages to Celery: the topic is the task's name, and the message's id is the task's."""

    def __init__(self) -> None:
        self._quiet_until = float("-inf")

    def __call__(self, message: OutboxMessage) -> None:
        """Publish one message. Returns when the broker has confirmed it.

        :raises BrokerUnavailableError: the broker can't be reached, or does not confirm. The message is not at fault.
        :raises TypeError: the payload is neither an object nor an array nor null, or not what the task takes.
        """
        args, kwargs = arguments_of(message)
        headers = {KEY_HEADER: message.idempotency_key}
        if message.account_id:
            headers[ACCOUNT_HEADER] = message.account_id
        publish(
            current_app,
            message.topic,
            args,
            kwargs,
            task_id=str(message.message_id),
            headers={**headers, **message.headers},
        )

    def nudge(self) -> None:
        """Ask a worker to relay what has just been committed. Never raises: the schedule's relay finds it too.

        A broker that can't be reached is left alone for a while, because this runs in the request that committed.
        """
        if time.monotonic() < self._quiet_until:
            return
        try:
            publish(current_app, RELAY_TASK, ignore_result=True, expires=NUDGE_EXPIRES)
        except Exception:  # whatever it is: the caller has committed, and the schedule's relay sends its messages
            self._quiet_until = time.monotonic() + QUIET
            logger.warning(
                "No worker could be asked to relay the outbox, and none is for the next %g s: the schedule's relay "
                "sends what is due",
                QUIET,
                exc_info=True,
            )


def arguments_of(message: OutboxMessage) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the task that a message's payload stands for.

    :raises TypeError: the payload is a number, a text or a boolean.
    """
    payload: object = json.loads(message.payload)
    if payload is None:
        return [], {}
    if isinstance(payload, list):
        return payload, {}
    if isinstance(payload, dict):
        return [], payload
    raise TypeError(
        f"The payload of a message to the task {message.topic!r} must be an object (its keyword arguments), an array "
        f"(its positional arguments) or null, not {type(payload).__name__}."
    )
