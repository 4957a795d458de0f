"""Publishing to Celery's broker with confirmation, timeouts, and separate connections.

A relay must know that the broker has a message before it marks it as sent. Celery's pool follows the project's
settings, which by default neither request confirms from RabbitMQ nor limit the wait for a broker.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from amqp.exceptions import AccessRefused, NotAllowed
from celery import current_app
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.pools import ProducerPool

from ...exceptions import BrokerUnavailableError
from ...foreign import import_tasks_of
from .messages import ACCOUNT_HEADER, KEY_HEADER

if TYPE_CHECKING:
    from ...outbox.models import OutboxMessage

logger: Final = logging.getLogger("idempotency")

#: Seconds. A healthy broker responds in milliseconds. A broker that blocks its publishers, like RabbitMQ when memory or
#: disk space runs low, may not respond for hours.
CONFIRM_TIMEOUT = 10.0

#: The first retry after a lost connection is immediate, because the connection was usually closed while idle.
RETRY_POLICY: Mapping[str, Any] = {"max_retries": 2, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}

BOUNDS: Mapping[str, Any] = {"retry": True, "retry_policy": RETRY_POLICY, "confirm_timeout": CONFIRM_TIMEOUT}

#: Otherwise kombu tries its first connection for much longer, or forever, depending on its version.
CONNECT_BOUNDS: Mapping[str, Any] = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.1, "interval_max": 0.1}

#: By default, calls to Redis have no timeout.
SOCKET_TIMEOUTS: Mapping[str, Any] = {"socket_connect_timeout": 4.0, "socket_timeout": CONFIRM_TIMEOUT}

#: The task that a nudge calls. Not imported, to avoid a circular import.
RELAY_TASK = "idempotency.contrib.celery.tasks.relay_outbox"

#: Seconds without nudges after the broker could not be reached, so that not every request waits for a failing
#: connection. The scheduled relay sends the messages meanwhile.
QUIET = 30.0

#: Seconds. By then, a later nudge or the schedule has run the relay.
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
        # RabbitMQ raises the last two for a wrong password or virtual host, so no message is at fault.
        raise BrokerUnavailableError(f"The broker can't be reached: {error}", all_topics=True) from error


def _pool(app: Any) -> Any:
    conf = app.conf
    # A forked process must neither use nor close its parent's connections: closing would send a message over the
    # parent's socket.
    place = (os.getpid(), app, repr(conf.broker_write_url), repr(conf.broker_transport_options))
    if place not in _pools:
        connection = app.connection_for_write(transport_options=CONNECT_BOUNDS)
        options = connection.transport_options
        if connection.transport.driver_type == "amqp":
            options["confirm_publish"] = True
        elif connection.transport.driver_type == "redis":
            options.update({**SOCKET_TIMEOUTS, **options})
        make: Any = ProducerPool  # kombu has few type annotations
        limit = conf.broker_pool_limit
        _pools.setdefault(place, make(connection.Pool(limit=limit), limit=limit))
    return _pools[place]


def publish(app: Any, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> None:
    """Publish a task by its name, with the options of its declaration if this process has it."""
    if app.conf.task_always_eager:
        if name not in app.tasks:
            # Celery discovers tasks only when a worker starts. If the task were missing, the message would go to a
            # broker without consumers and count as sent.
            import_tasks_of(app)()
        app.tasks[name].apply_async(args, kwargs, **options)
        return
    task = app.tasks.get(name)
    send = functools.partial(app.send_task, name) if task is None else task.apply_async
    with confirming_producer(app) as producer:
        send(args, kwargs, producer=producer, add_to_parent=False, **BOUNDS, **options)


def publish_again(task: Any, request: Any, **changes: Any) -> None:
    """Publish the message of a running task again, with everything that Celery's ``retry`` keeps, such as its id.

    Published by name, so that Celery does not check the arguments against the task's signature.
    """
    same = task.signature_from_request(request, **changes)
    options = {"serializer": task.serializer, "compression": getattr(task, "compression", None)} | same.options
    options["add_to_parent"] = False
    with confirming_producer(task.app) as producer:
        task.app.send_task(task.name, same.args, same.kwargs, producer=producer, **BOUNDS, **options)


class CelerySender:
    """Sends messages of the outbox to Celery. The topic is the task's name, the message's id the task's id."""

    def __init__(self) -> None:
        self._quiet_until = float("-inf")

    def __call__(self, message: OutboxMessage) -> None:
        """Publish a message. Returns when the broker has confirmed it.

        :raises BrokerUnavailableError: the broker can't be reached, or does not confirm. The message is not at fault.
        :raises TypeError: the payload is neither an object nor an array nor null, or the task doesn't take it.
        """
        args, kwargs = arguments_of(message)
        account = {ACCOUNT_HEADER: message.account_id} if message.account_id else {}
        headers = {KEY_HEADER: message.idempotency_key, **account, **message.headers}
        # Always the same id, because a message whose confirmation was lost is published again.
        publish(current_app, message.topic, args, kwargs, task_id=str(message.message_id), headers=headers)

    def nudge(self) -> None:
        """Make a worker relay the messages just committed. Never raises."""
        if time.monotonic() < self._quiet_until:
            return
        try:
            publish(current_app, RELAY_TASK, ignore_result=True, expires=NUDGE_EXPIRES)
        except Exception:  # the caller has committed, and the scheduled relay sends its messages anyway
            self._quiet_until = time.monotonic() + QUIET
            logger.warning(
                "No worker could be nudged to relay the outbox. The next nudge is in %g s at the earliest; until then "
                "the scheduled relay sends due messages",
                QUIET,
                exc_info=True,
            )


#: The default sender of the outbox, as the dotted path ``idempotency.contrib.celery.send``.
send: Final = CelerySender()


def arguments_of(message: OutboxMessage) -> tuple[list[Any], dict[str, Any]]:
    """:raises TypeError: the payload is a number, a text or a boolean."""
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
