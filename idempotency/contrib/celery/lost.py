"""Resends messages that a broker confirmed and then lost.

Redis loses a message if Redis or the worker's main process dies during the handover. The outbox still has the message,
and resending it is always safe, because its consumer is idempotent. A message counts as lost if its consumer has no
record of it, or was cut off without another delivery. So outbox and records must be in one database.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import current_app
from django.db.models import Q

from ...foreign import behind_proxy
from ...identity.scope import Scope
from ...lifecycle import Status
from ...models import IdempotencyRecord, Now
from ...outbox import CELERY
from ...outbox.models import MessageStatus, OutboxMessage, outbox_database
from .messages import ACCOUNT_HEADER, DEFAULT_ACCOUNT, KEY_HEADER
from .policy import TaskPolicy, idempotent_tasks

#: An unconsumed message counts as lost this long after it was sent, which is longer than messages usually wait in a
#: queue. Resending a waiting message is harmless: its consumer finds the record of the first delivery.
OLDER_THAN = timedelta(minutes=10)

#: Messages sent longer ago than this are not searched.
LOOK_BACK = timedelta(days=1)

#: Messages compared at once. One statement finds all their records.
PAGE = 100


def resend_lost_messages(
    *, older_than: timedelta = OLDER_THAN, look_back: timedelta = LOOK_BACK, app: Any = None
) -> int:
    """Resend unconsumed messages.

    Covers the idempotent tasks registered in this process; a worker registers its own. A message is resent after
    ``older_than``. While it stays unconsumed, the time to each repetition doubles, so that repetitions don't fill the
    queue of stopped workers. May run concurrently, and may be killed.

    :param older_than: the time since sending after which an unconsumed message counts as lost.
    :param look_back: messages sent longer ago than this are skipped. So are messages written longer ago than their
        operation's ``retention``, because their records may have been purged.
    :param app: the Celery app; by default the current one.
    :returns: the number of messages made due.
    :raises DatabaseError: the database refuses. Messages made due stay due.
    """
    policies = {task.name: policy for task, policy in idempotent_tasks(app or behind_proxy(current_app))}
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
            # The update rechecks status and sent_at, because another run may have been faster. It also checks the
            # retention by its own clock: if the process slept before it read the records, they may have been purged.
            remembered = Now() - policies[message.topic].operation.policy.retention
            again = messages.filter(
                pk=message.pk, status=MessageStatus.SENT, sent_at=message.sent_at, created_at__gt=remembered
            )
            resent += again.update(status=MessageStatus.PENDING, attempts=0, next_try_at=Now(), lease_expires_at=None)
        # A relay marks a whole batch with the same time, so a page may end within a batch.
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
    # A recoverable record without an error belongs to a run that was cut off. If Redis loses the message during its
    # redelivery, only the outbox has it. With an error, the task failed, and its message was retried or given up.
    known = records.exclude(status=Status.RECOVERABLE, error=None)
    recorded = {Scope(*row) for row in known.values_list("account_id", "operation", "idempotency_key")}
    # Doubles the pause: the time since the last sending must be at least the time from the writing to that sending.
    return [
        message
        for message in page
        if scopes[message.pk] not in recorded and message.now - message.sent_at >= message.sent_at - message.created_at
    ]


def _scope_of(message: OutboxMessage, policy: TaskPolicy) -> Scope:
    """The scope under which its consumer claims the message. See ``messages.scope_of_message``."""
    headers = {
        KEY_HEADER: message.idempotency_key,
        ACCOUNT_HEADER: message.account_id or DEFAULT_ACCOUNT,
        **message.headers,
    }
    return Scope(policy.consumer or headers[ACCOUNT_HEADER], policy.operation.name, headers[KEY_HEADER])
