"""A worker in the test's process, which takes a message from a real broker on request.

It calls Celery's functions for the pool process, then for the main process, one after the other. A message with a
countdown is delivered at once, because the waiting is Celery's part.
"""

import ast
import base64
import json
import uuid
from typing import Any, NamedTuple

from celery.app.trace import trace_task_ret
from celery.exceptions import Reject
from celery.worker.request import Request

from tests.concurrency.failures import Killed

QUEUE, DEAD = "celery", "tests.dead"
#: The headers of a message's identity.
KEY, ACCOUNT = "idempotency_key", "idempotency_account"

#: The action of a task's next run after its effect, by the task's first argument.
acts = {}


class FailureError(Exception):
    """The error of a failing task."""


def fail(task):
    raise FailureError


def succeed(task):
    return "done"


def dies(task):
    raise Killed


def acting(label, *each):
    """Run these acts one after the other. The last one repeats."""
    left = list(each)
    acts[label] = lambda task: (left.pop(0) if len(left) > 1 else left[0])(task)


class Delivered(NamedTuple):
    """``acknowledged``, ``rejected`` or ``requeued``, and the result or error of the task."""

    answer: str
    result: Any


class Inbox:
    """The queues of one test in Redis."""

    def __init__(self, app, connection):
        self.app = app
        self.channel = connection.default_channel
        self.redis = getattr(self.channel, "client", None)

    def publish(self, task, *args, task_id=None, **options):
        """Publish like another service, which knows the task's name but not its policy."""
        task_id = task_id or str(uuid.uuid4())
        self.app.send_task(task.name, args, options.pop("kwargs", {}), task_id=task_id, **options)
        return task_id

    def twice(self):
        """Let the broker deliver its next message again, after the others."""
        self.redis.lpush(QUEUE, self.redis.lindex(QUEUE, -1))

    def deliver(self):
        """Take the next message, run its task, and answer the broker as a worker does."""
        message = self.channel.basic_get(QUEUE)
        assert message is not None, "nothing is in the queue"
        answers = []

        def acknowledge(*_):
            answers.append("acknowledged")
            message.ack()

        def reject(log, errors, requeue):
            answers.append("requeued" if requeue else "rejected")
            message.reject(requeue=requeue)

        task = self.app.tasks[message.headers["task"]]
        request = Request(message, app=self.app, task=task, on_ack=acknowledge, on_reject=reject)
        if not task.acks_late:
            request.acknowledge()
        body = (message.body, message.content_type, message.content_encoding)
        try:
            done = trace_task_ret(task.name, request.id, request.request_dict, *body, app=self.app)
        except Killed as death:
            reject(None, None, requeue=True)  # reject_on_worker_lost
            return Delivered("requeued", death)
        request.on_success(done)
        failed, result, _ = done
        (answer,) = answers
        if not failed:
            return Delivered(answer, ast.literal_eval(result))
        error = getattr(result.exception, "exc", result.exception)
        assert not isinstance(error, Reject) or isinstance(error.requeue, bool)
        return Delivered(answer, error)

    def drain(self):
        found = []
        while self.redis.llen(QUEUE):
            found.append(self.deliver())
        return found

    def messages(self, queue=QUEUE):
        """The headers and arguments of the messages in a queue, in delivery order. The messages stay there."""
        raw = [json.loads(text) for text in reversed(self.redis.lrange(queue, 0, -1))]
        return [one["headers"] | {"body": json.loads(base64.b64decode(one["body"]))} for one in raw]
