"""What is known of the state of a record or a message, and what to do next: a few sentences on its page."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.admin.utils import display_for_value
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..lifecycle import Recovery, Status
from ..models import IdempotencyRecord, MessageStatus, OutboxMessage
from ..operation import registry
from .display import NONE, time_left

#: What happens to an abandoned claim, by what its operation declares.
_ON_ABANDONED = {
    Recovery.REEXECUTE: _(
        "The operation declares REEXECUTE: the next retry runs it again, and a sweep makes the record recoverable."
    ),
    Recovery.RECONCILE: _("The operation declares a reconciler: the next retry or sweep asks it what has happened."),
    Recovery.PARK: _("The operation declares PARK: the next retry or sweep parks the record."),
}

#: Why a record is parked, by what its operation declares.
_WHY_PARKED = {
    Recovery.REEXECUTE: _("The operation declares REEXECUTE by now, but a parked record stays parked."),
    Recovery.RECONCILE: _("The operation declares a reconciler, and none of its answers could settle the record."),
    Recovery.PARK: _("The operation declares PARK, so it is never run again by itself."),
}

_UNKNOWN_OPERATION = _(
    "No operation of this name is declared in this process, so it is not known here what it declares. A sweep that "
    "does not know it either leaves an abandoned claim alone: declare it in an app's operations.py."
)


def explain_record(record: IdempotencyRecord) -> list[Any]:
    """:param record: annotated with ``database_time``."""
    operation = registry.get(record.operation)
    recovery = None if operation is None else operation.recovery
    told = {
        "attempt": record.attempt,
        "lease": display_for_value(record.lease_expires_at, NONE),
        "retention": display_for_value(record.expires_at, NONE),
    }
    if time_left(record, record.expires_at) <= timedelta(0) and record.status != Status.IN_PROGRESS:
        retention = [gettext("Its retention ended at %(retention)s: the same key is a new request.") % told]
    else:
        retention = []
    if record.status == Status.COMPLETED:
        if retention:
            return retention
        return [gettext("Every retry is answered with the recorded outcome, until %(retention)s.") % told]
    if record.status == Status.RECOVERABLE:
        return retention or [
            gettext("Attempt %(attempt)d is known to have had no effect. The next retry runs the operation.") % told
        ]
    if record.status == Status.PARKED:
        return [
            gettext(
                "Attempt %(attempt)d ended without a recorded outcome: its process was cut off, or raised an error "
                "after which nobody could say whether the operation took effect. Nothing else is kept of it; look for "
                "the error in the log of that time."
            )
            % told,
            _UNKNOWN_OPERATION if recovery is None else _WHY_PARKED[recovery],
            gettext(
                "Every retry is answered 409. Find out whether the operation took effect, where it takes effect. If it "
                "did, record its outcome. If it did not, and can not any more, mark it as not executed."
            ),
            *retention,
        ]
    if time_left(record, record.lease_expires_at) > timedelta(0):
        return [gettext("Attempt %(attempt)d is presumed to be running until its lease ends at %(lease)s.") % told]
    return [
        gettext(
            "The lease of attempt %(attempt)d ended at %(lease)s, and no outcome was recorded: its process was cut "
            "off, or is slower than its lease."
        )
        % told,
        _UNKNOWN_OPERATION if recovery is None else _ON_ABANDONED[recovery],
        gettext("If this stays so for longer than the interval of the sweeps, no sweep runs."),
    ]


def explain_message(message: OutboxMessage) -> list[Any]:
    """:param message: annotated with ``database_time``."""
    if message.status == MessageStatus.SENT:
        return [gettext("Its broker has confirmed it.")]
    if message.status == MessageStatus.DEAD:
        tried = ngettext(
            "It was tried %(count)d time, and is not tried again by itself. The last error says why.",
            "It was tried %(count)d times, and is not tried again by itself. The last error says why.",
            message.attempts,
        )
        return [
            tried % {"count": message.attempts},
            gettext("Messages of the same ordering key wait for it. Repair what is wrong, then requeue it."),
        ]
    return [
        gettext(
            "It waits for a relay, or for a message before it in its order. If it is due for longer than a minute, no "
            "relay runs or its broker can't be reached."
        )
    ]
