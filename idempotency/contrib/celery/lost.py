"""Messages that a broker has confirmed and then lost: found by what their consumers have not recorded, and sent again.

Redis loses a message if the worker's main process, or Redis itself, dies in the moment in which it hands it over. The
outbox still has it, and sending it again is always safe, because its consumer is idempotent. Where outbox and records
are in one database, the two can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from celery import current_app
from django.db.models import QuerySet
from django.db.models.functions import Now

from ...identity.scope import Scope
from ...models import IdempotencyRecord, MessageStatus, OutboxMessage
from ...outbox import CELERY, alias
from .identity import ACCOUNT_HEADER, DEFAULT_ACCOUNT, KEY_HEADER
from .policy import TaskPolicy, idempotent_tasks

#: How long after a message was sent it is taken for lost. Longer than messages usually lie in the queue: one that still
#: does is sent a second time, which costs a look at its record.
OLDER_THAN = timedelta(minutes=10)
#: What was sent longer ago than this is not looked at any more.
LOOK_BACK = timedelta(days=1)

#: Messages looked at together. Their records are found by all of their accounts, operations and keys in one statement.
PAGE = 100


def resend_lost_messages(
    *,
    older_than: timedelta = OLDER_THAN,
    look_back: timedelta = LOOK_BACK,
    app: Any = None,
    using: str | None = None,
) -> int:
    """Have those messages sent again that were sent and have no record with their consumer.

    Of the tasks that are idempotent and known to this process, as a worker knows its own. A message is sent again after
    ``older_than``, and then each time after as long again as it has been waiting, so that a queue whose workers are
    down doesn't fill up with repetitions.

    Safe to run many at once, and to kill: what it does is to make a message due, and the relay sends it under its id.

    :param older_than: how long ago a message was sent that is taken for lost.
    :param look_back: how long ago a message was sent that is not looked at any more. Nor is one that was written longer
        ago than its operation's ``ttl``: it may have been consumed and its record purged, which can't be told from a
        record that was never made.
    :param app: the Celery app; by default the current one.
    :param using: the database of outbox and records; by default that of the outbox.
    :returns: how many messages are to be sent again.
    :raises DatabaseError: as the database does. What was made due stays due.
    """
    policies = {task.name: policy for task, policy in idempotent_tasks(app or current_app._get_current_object())}
    messages = OutboxMessage.objects.using(using or alias())
    sent = messages.filter(
        status=MessageStatus.SENT,
        sender=CELERY,
        topic__in=sorted(policies),
        sent_at__lte=Now() - older_than,
        sent_at__gt=Now() - look_back,
    )
    found = 0
    after: datetime | None = None
    while page := _page(sent, after):
        missing = _without_record(page, policies)
        # Still sent, and not sent again since: another run of this may have been faster.
        for message in missing:
            # The retention is judged once more, by the clock of this statement: a process that slept since it looked
            # for the record might have looked after the record was purged.
            remembered = Now() - policies[message.topic].operation.ttl
            again = messages.filter(
                pk=message.pk, status=MessageStatus.SENT, sent_at=message.sent_at, created_at__gt=remembered
            )
            found += again.update(status=MessageStatus.PENDING, attempts=0, next_try_at=Now(), lease_expires_at=None)
        after = page[-1].sent_at
    return found


def _page(sent: QuerySet[OutboxMessage], after: datetime | None) -> list[Any]:
    later = sent if after is None else sent.filter(sent_at__gt=after)
    first = list(later.order_by("sent_at").annotate(now=Now())[:PAGE])
    if len(first) < PAGE:
        return first
    # A relay marks a whole batch at one time, and the next page begins after it.
    return [
        *(message for message in first if message.sent_at != first[-1].sent_at),
        *sent.filter(sent_at=first[-1].sent_at).annotate(now=Now()),
    ]


def _without_record(page: list[Any], policies: Mapping[str, TaskPolicy]) -> list[Any]:
    scopes = {message.pk: _scope_of(message, policies[message.topic]) for message in page}
    records = IdempotencyRecord.objects.using(page[0]._state.db).filter(
        account_id__in={scope.account_id for scope in scopes.values()},
        operation__in={scope.operation for scope in scopes.values()},
        idempotency_key__in={scope.idempotency_key for scope in scopes.values()},
    )
    known = {Scope(*row) for row in records.values_list("account_id", "operation", "idempotency_key")}
    return [message for message in page if scopes[message.pk] not in known and _has_waited(message)]


def _has_waited(message: Any) -> bool:
    """Whether it was sent at least as long ago as it had been waiting by then."""
    return bool(message.now - message.sent_at >= message.sent_at - message.created_at)


def _scope_of(message: OutboxMessage, policy: TaskPolicy) -> Scope:
    """Under which identity its consumer claims a message: see ``identity.scope_of_message``."""
    headers = {
        KEY_HEADER: message.idempotency_key,
        ACCOUNT_HEADER: message.account_id or DEFAULT_ACCOUNT,
        **message.headers,
    }
    return Scope(policy.consumer or headers[ACCOUNT_HEADER], policy.operation.name, headers[KEY_HEADER])
