"""Finds messages that a broker confirmed and then lost, and has them sent again.

Redis loses a message if Redis or the worker's main process dies at the moment at which the message is handed over. The
outbox still has the message, and it is always safe to send it again, because its consumer is idempotent. A message is
taken for lost if its consumer has no record of it, or if its consumer was cut off and no delivery has followed. For
that, outbox and records must be in one database.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import current_app
from django.db.models import Q
from django.db.models.functions import Now

from ...identity.scope import Scope
from ...lifecycle import Status
from ...models import IdempotencyRecord
from ...outbox import CELERY
from ...outbox.models import MessageStatus, OutboxMessage, outbox_database
from .messages import ACCOUNT_HEADER, DEFAULT_ACCOUNT, KEY_HEADER
from .policy import TaskPolicy, idempotent_tasks

#: A message that was not consumed is taken for lost this long after it was sent. This is longer than messages usually
#: wait in a queue. A message that still waits there is sent a second time, which is harmless: its consumer finds its
#: record.
OLDER_THAN = timedelta(minutes=10)

#: Messages sent longer ago than this are not searched.
LOOK_BACK = timedelta(days=1)

#: The number of messages that are compared at once. One statement finds the records of all of them.
PAGE = 100


def resend_lost_messages(
    *, older_than: timedelta = OLDER_THAN, look_back: timedelta = LOOK_BACK, app: Any = None
) -> int:
    """Have messages sent again that were sent and not consumed.

    It looks at the messages of idempotent tasks that this process knows, as a worker knows its own tasks. A message is
    sent again after ``older_than``. If it is still not consumed then, the time to the next repetition doubles, so that
    repetitions don't fill up a queue whose workers are down. Several of these may run at once, and one may be killed.

    :param older_than: messages that were sent later than this ago are not taken for lost yet.
    :param look_back: messages that were sent longer ago than this are not looked at any more. Nor are messages that
        were written longer ago than their operation's ``retention``, because their records may have been purged.
    :param app: the Celery app; by default the current one.
    :returns: how many messages were made due.
    :raises DatabaseError: the database refuses. Messages that were made due stay due.
    """
    policies = {task.name: policy for task, policy in idempotent_tasks(app or current_app._get_current_object())}
    messages = OutboxMessage.objects.using(outbox_database())
    sent = messages.filter(
        status=MessageStatus.SENT,
        sender=CELERY,
        topic__in=sorted(policies),
        sent_at__lte=Now() - older_than,
        sent_at__gt=Now() - look_back,
    )
    resent, later = 0, Q()
    while page := list(sent.filter(later).order_by("sent_at", "pk").annotate(now=Now())[:PAGE]):
        for message in _not_consumed(page, policies):
            # The update checks the status and sent_at again, because another run of this may have been faster. It also
            # checks the retention again, by the clock of this statement. If the process slept before it looked for the
            # record, the record may have been purged by then.
            remembered = Now() - policies[message.topic].operation.policy.retention
            again = messages.filter(
                pk=message.pk, status=MessageStatus.SENT, sent_at=message.sent_at, created_at__gt=remembered
            )
            resent += again.update(status=MessageStatus.PENDING, attempts=0, next_try_at=Now(), lease_expires_at=None)
        # A relay marks a whole batch with one time, so a page may end within such a batch.
        last = page[-1]
        later = Q(sent_at__gte=last.sent_at) & (Q(sent_at__gt=last.sent_at) | Q(pk__gt=last.pk))
    return resent


def _not_consumed(page: list[Any], policies: Mapping[str, TaskPolicy]) -> list[Any]:
    scopes = {message.pk: _scope_of(message, policies[message.topic]) for message in page}
    records = IdempotencyRecord.objects.using(page[0]._state.db).filter(
        account_id__in={scope.account_id for scope in scopes.values()},
        operation__in={scope.operation for scope in scopes.values()},
        idempotency_key__in={scope.idempotency_key for scope in scopes.values()},
    )
    # A recoverable record without an error is that of a run that was cut off. If Redis loses the message as it delivers
    # it again, only the outbox has it. An error says that the task failed: its message was retried or given up.
    known = records.exclude(status=Status.RECOVERABLE, error=None)
    recorded = {Scope(*row) for row in known.values_list("account_id", "operation", "idempotency_key")}
    # Each pause doubles: the time since the message was last sent is at least the time from its writing until then.
    return [
        message
        for message in page
        if scopes[message.pk] not in recorded and message.now - message.sent_at >= message.sent_at - message.created_at
    ]


def _scope_of(message: OutboxMessage, policy: TaskPolicy) -> Scope:
    """The identity under which its consumer claims the message. See ``messages.scope_of_message``."""
    headers = {
        KEY_HEADER: message.idempotency_key,
        ACCOUNT_HEADER: message.account_id or DEFAULT_ACCOUNT,
        **message.headers,
    }
    return Scope(policy.consumer or headers[ACCOUNT_HEADER], policy.operation.name, headers[KEY_HEADER])
