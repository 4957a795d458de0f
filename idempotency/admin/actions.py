"""The decisions about a record, with their forms."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.admin.widgets import AdminTextareaWidget, AdminTextInputWidget
from django.http import HttpResponse
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..operate import resolutions
from ..operation import registry
from .decisions import Action, ReasonForm
from .display import time_left

_PARKED = frozenset({Status.PARKED.value})


class OutcomeForm(ReasonForm):
    status: forms.IntegerField = forms.IntegerField(label=_("Status"), min_value=200, max_value=599, initial=201)
    content_type: forms.CharField = forms.CharField(
        label=_("Content type"), max_length=255, initial="application/json", widget=AdminTextInputWidget
    )
    body: forms.CharField = forms.CharField(
        label=_("Body"),
        required=False,
        strip=False,
        help_text=_("Every retry gets exactly this text."),
        widget=AdminTextareaWidget,
    )
    field_order: tuple[str, ...] = ("status", "content_type", "body", "reason")

    def clean_content_type(self) -> str:
        content_type: str = self.cleaned_data["content_type"]
        if not content_type.isprintable() or not content_type.isascii():
            raise forms.ValidationError(gettext("A content type may only contain printable ASCII characters."))
        return content_type

    def clean_body(self) -> str:
        body: str = self.cleaned_data["body"].replace("\r\n", "\n")  # browsers send \r\n at the end of a line
        if "json" in self.cleaned_data.get("content_type", ""):
            try:
                json.loads(body)
            except ValueError as error:
                raise forms.ValidationError(gettext("This is not JSON: %(error)s") % {"error": error}) from error
            except RecursionError as error:
                raise forms.ValidationError(gettext("This JSON is nested too deeply.")) from error
        return body

    def arguments(self) -> dict[str, Any]:
        data = self.cleaned_data
        response = HttpResponse(data["body"].encode(), status=data["status"], content_type=data["content_type"])
        return {"response_or_result": response, "reason": data["reason"]}


def has_live_lease(record: IdempotencyRecord) -> bool:
    return time_left(record, record.lease_expires_at) > timedelta(0)


MARK_NOT_EXECUTED = Action(
    name="mark_not_executed",
    title=_("Mark as not executed"),
    consequence=ngettext_lazy(
        "You know that this operation did not take effect, and that no late call can still arrive. Its next retry runs "
        "it. If you are wrong, it takes effect twice.",
        "You know that these operations did not take effect, and that no late call can still arrive. The next retry of "
        "each operation runs it. If you are wrong, it takes effect twice.",
        "count",
    ),
    permission="resolve",
    form=ReasonForm,
    decide=resolutions.mark_not_executed,
    statuses=_PARKED,
    is_dangerous=True,
)
RECORD_OUTCOME = Action(
    name="record_outcome",
    title=_("Record an outcome"),
    consequence=_(
        "You know that this operation took effect, and how it ended. Every retry gets the response that you enter "
        "here. The operation does not run again under this key."
    ),
    permission="resolve",
    form=OutcomeForm,
    decide=resolutions.record_outcome,
    statuses=_PARKED,
    problem_of=lambda record: (
        None if registry.get(record.operation) else _("Its operation is not declared in this process.")
    ),
    single=True,
)
RELEASE = Action(
    name="release",
    title=_("Release"),
    consequence=ngettext_lazy(
        "The next retry runs the operation, even if it declares PARK or a reconciler. If it has taken effect, or still "
        "can, it takes effect twice unless it is safe to run again.",
        "The next retry of each operation runs it, even if it declares PARK or a reconciler. An operation that has "
        "taken effect, or still can, takes effect twice unless it is safe to run again.",
        "count",
    ),
    permission="release",
    form=ReasonForm,
    decide=resolutions.release,
    statuses=frozenset({Status.PARKED.value, Status.IN_PROGRESS.value}),
    problem_of=lambda record: (
        _("Its lease is running. Wait until the lease is over.")
        if record.status == Status.IN_PROGRESS and has_live_lease(record)
        else None
    ),
    is_dangerous=True,
)
FORGET = Action(
    name="forget",
    title=_("Forget"),
    consequence=ngettext_lazy(
        "The next request with this key runs as a new request, even with another payload, and retries no longer get "
        "the recorded outcome. If the operation took effect, it takes effect a second time. Forget a record only if "
        "you want that, for example after a bug fix.",
        "The next request with each key runs as a new request, even with another payload, and retries no longer get "
        "the recorded outcome. An operation that took effect takes effect a second time. Forget a record only if you "
        "want that, for example after a bug fix.",
        "count",
    ),
    permission="forget",
    form=ReasonForm,
    decide=resolutions.forget,
    statuses=frozenset({Status.COMPLETED.value}),
    problem_of=lambda record: (
        _("It is past its retention, so the next request with its key runs anyway.")
        if time_left(record, record.expires_at) <= timedelta(0)
        else None
    ),
    is_dangerous=True,
)
