"""Explains on the page of a record the meaning of its state and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..lifecycle import Recovery, Status
from ..models import IdempotencyRecord
from ..operation import registry
from ..outcome import BODY_GONE
from .display import show_time, time_left

#: What happens to an abandoned claim, by the recovery that its operation declares.
_ON_ABANDONED = {
    Recovery.REEXECUTE: _(
        "The operation declares REEXECUTE: the next retry runs it again, and a sweep makes the record recoverable."
    ),
    Recovery.RECONCILE: _("The operation declares a reconciler: the next retry or sweep asks it what happened."),
    Recovery.PARK: _("The operation declares PARK: the next retry or sweep parks the record."),
}

#: Why a record is parked, by the recovery that its operation declares.
_WHY_PARKED = {
    Recovery.REEXECUTE: _("The operation declares REEXECUTE now, but a record that was parked before stays parked."),
    Recovery.RECONCILE: _("The operation declares a reconciler, but none of its answers settled the record."),
    Recovery.PARK: _("The operation declares PARK, so it never runs again automatically."),
}

_UNKNOWN_OPERATION = _(
    "No operation of this name is declared in this process, so its recovery is not known here. A sweep that does not "
    "know the operation leaves its abandoned claims alone. Declare the operation in an app's operations.py."
)

_NEWER_RELEASE = _(
    "A newer release wrote this state. This release answers every retry with status 503 and changes nothing. Finish "
    "the deploy, or deploy the newer release again."
)


def explain_record(record: IdempotencyRecord) -> list[Any]:
    """:param record: annotated with ``database_time``."""
    operation = registry.get(record.operation)
    recovery = None if operation is None else operation.recovery
    if record.status not in set(Status):
        return [_NEWER_RELEASE]
    values = {
        "attempt": record.attempt,
        "lease": show_time(record.lease_expires_at),
        "retention": show_time(record.expires_at),
    }
    if time_left(record, record.expires_at) <= timedelta(0) and record.status != Status.IN_PROGRESS:
        retention = [gettext("Its retention ended at %(retention)s, so the same key now makes a new request.") % values]
    else:
        retention = []
    if record.status == Status.COMPLETED:
        return retention or [_explain_completed(record, values)]
    if record.status == Status.RECOVERABLE:
        return retention or [
            gettext("Attempt %(attempt)d is known to have had no effect. The next retry runs the operation.") % values
        ]
    if record.status == Status.PARKED:
        return [
            gettext(
                "Attempt %(attempt)d ended without a recorded outcome. Either its process was cut off, or it raised "
                "an error that leaves open whether the operation took effect. Such an error is in the log of that time "
                "and, for those who may see recorded responses, under Last error."
            )
            % values,
            _UNKNOWN_OPERATION if recovery is None else _WHY_PARKED[recovery],
            gettext(
                "Every retry gets status 409. Find out whether the operation took effect, for example from the "
                "provider that it calls. If it took effect, record its outcome. If it did not and no longer can, mark "
                "it as not executed."
            ),
            *retention,
        ]
    if time_left(record, record.lease_expires_at) > timedelta(0):
        return [gettext("Until its lease ends at %(lease)s, attempt %(attempt)d is presumed to be running.") % values]
    return [
        gettext(
            "The lease of attempt %(attempt)d ended at %(lease)s, and no outcome was recorded. Its process was cut "
            "off, or it needs more time than its lease allows."
        )
        % values,
        _UNKNOWN_OPERATION if recovery is None else _ON_ABANDONED[recovery],
        gettext("If the record stays in this state for longer than the interval between sweeps, no sweep is running."),
    ]


def _explain_completed(record: IdempotencyRecord, values: Mapping[str, Any]) -> str:
    if record.body_expires_at is not None:
        return gettext(
            "Every retry gets the recorded outcome. A purge deletes the response after %(body)s and keeps the record "
            "until %(retention)s."
        ) % {**values, "body": show_time(record.body_expires_at)}
    if record.response_body == BODY_GONE:
        return (
            gettext(
                "The response is no longer kept. Until %(retention)s a retry does not run. It is answered by rebuild, "
                "if the operation declares it and the record has a reference, or else with status 409."
            )
            % values
        )
    return gettext("Until %(retention)s, every retry gets the recorded outcome.") % values
