"""A worker in the test's own process, which takes a message from a real broker when it is told to.

What the pool's process does, and what the worker's main process does with its answer, are Celery's own functions,
called one after the other. A message with a countdown is delivered at once: that it waits is Celery's business.
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
#: The headers of a message that say what it is.
KEY, ACCOUNT = "idempotency_key", "idempotency_account"

#: What the next run of a task is to do after its effect, by the task's first argument.
acts = {}


class FailureError(Exception):
    """What a task fails with."""


def fail(task):
    raise FailureError


def succeed(task):
    return "done"


def dies(task):
    raise Killed


def acting(label, *each):
    """One after the other, and the last one from then on."""
    left = list(each)
    acts[label] = lambda task: (left.pop(0) if len(left) > 1 else left[0])(task)


class Delivered(NamedTuple):
    """``acknowledged``, ``rejected`` or ``requeued``, and what the task returned or raised."""

    answer: str
    result: Any


class Inbox:
    """The queues of one test, at a Redis of the tests'."""

    def __init__(self, app, connection):
        self.app = app
        self.channel = connection.default_channel
        self.redis = getattr(self.channel, "client", None)

    def publish(self, task, *args, task_id=None, **options):
        """As a producer elsewhere does, that knows the task by its name and nothing of its policy."""
        task_id = task_id or str(uuid.uuid4())
        self.app.send_task(task.name, args, options.pop("kwargs", {}), task_id=task_id, **options)
        return task_id

    def twice(self):
        """Let the broker deliver its next message a second time, after the others."""
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
        """The headers of what lies in a queue, and its arguments, in the order of delivery. It stays there."""
        raw = [json.loads(text) for text in reversed(self.redis.lrange(queue, 0, -1))]
        return [one["headers"] | {"body": json.loads(base64.b64decode(one["body"]))} for one in raw]
