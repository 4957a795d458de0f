"""The admin's actions on stuck records: a page that says what it means, a form, and then ``upkeep.resolutions``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from ..exceptions import IdempotencyError
from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..upkeep import resolutions

if TYPE_CHECKING:
    from .records import IdempotencyRecordAdmin

#: As many as a person can look at on one page. For more there are the functions in ``upkeep.resolutions``.
MAX_DECIDED = 100


class ReasonForm(forms.Form):
    reason = forms.CharField(
        max_length=500,
        help_text="How you know. It is kept in the record's history and in the log.",
        widget=forms.TextInput(attrs={"class": "vTextField"}),
    )


class ReleaseForm(ReasonForm):
    force = forms.BooleanField(
        required=False,
        label="Live claims too",
        help_text="Of operations that declare REEXECUTE, and of no others: their owner loses its lease, and what it "
        "wrote is rolled back or carries the same derived keys as the retry.",
    )


class OutcomeForm(ReasonForm):
    status = forms.IntegerField(min_value=200, max_value=599, initial=201)
    content_type = forms.CharField(
        max_length=255, initial="application/json", widget=forms.TextInput(attrs={"class": "vTextField"})
    )
    body = forms.CharField(
        required=False,
        strip=False,
        help_text="What every retry is answered with, as it is.",
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 10}),
    )
    field_order = ("status", "content_type", "body", "reason")

    def clean_content_type(self) -> str:
        content_type: str = self.cleaned_data["content_type"]
        if not content_type.isprintable() or not content_type.isascii():
            raise forms.ValidationError("A header's value is made of visible ASCII characters.")
        return content_type

    def clean_body(self) -> str:
        body: str = self.cleaned_data["body"].replace("\r\n", "\n")  # as a browser sends each line's end
        if "json" in self.cleaned_data.get("content_type", ""):
            try:
                json.loads(body)
            except ValueError as error:
                raise forms.ValidationError(f"This is not JSON: {error}") from error
        return body

    def response(self) -> HttpResponse:
        data = self.cleaned_data
        return HttpResponse(data["body"].encode(), status=data["status"], content_type=data["content_type"])


def page(shown: admin.ModelAdmin[Any], request: HttpRequest, template: str, **context: Any) -> TemplateResponse:
    """The page that asks before something is decided, by a template that extends ``decision.html``."""
    common = {
        **shown.admin_site.each_context(request),
        "opts": shown.opts,
        "media": shown.media,
        "checkbox_name": ACTION_CHECKBOX_NAME,
    }
    return TemplateResponse(request, template, {**common, **context})


@dataclass(frozen=True)
class Kind:
    """One of the actions."""

    action: str
    title: str
    consequence: str
    form: type[ReasonForm]
    decide: Callable[[IdempotencyRecord, Any, Any], None]
    #: One record at a time: what is said of it can't be true of two.
    single: bool = False


MARK_NOT_EXECUTED = Kind(
    "mark_not_executed",
    "Mark as not executed",
    "You know that these operations did not take effect, and that no late call will still arrive. The next retry of "
    "each runs it. If you are wrong, it takes effect twice.",
    ReasonForm,
    lambda record, form, by: resolutions.mark_not_executed(record, by=by, reason=form.cleaned_data["reason"]),
)
RECORD_OUTCOME = Kind(
    "record_outcome",
    "Record an outcome",
    "You know that this operation took effect, and how it ended. Every retry is answered with what you enter here, as "
    "if the operation had answered so. It never runs again.",
    OutcomeForm,
    lambda record, form, by: resolutions.record_outcome(
        record, form.response(), by=by, reason=form.cleaned_data["reason"]
    ),
    single=True,
)
RELEASE = Kind(
    "release",
    "Release",
    "The next retry of each of these operations runs it at once, whatever it declares about recovery. If one has taken "
    "effect or still will, and is not safe to run again, it takes effect twice.",
    ReleaseForm,
    lambda record, form, by: resolutions.release(
        record, by=by, reason=form.cleaned_data["reason"], force=form.cleaned_data["force"]
    ),
)


@dataclass(frozen=True)
class Seen:
    """What a record was when a person was asked about it. They decided on that, and on nothing it became since."""

    pk: int
    attempt: int
    status: Status

    @property
    def token(self) -> str:
        return f"{self.pk}:{self.attempt}:{self.status}"

    @classmethod
    def parse(cls, token: str) -> Seen:
        try:
            pk, attempt, status = token.split(":")
            return cls(int(pk), int(attempt), Status(status))
        except ValueError as error:
            raise BadRequest(f"{token!r} names no record and its state.") from error


class Decision:
    """One request of an action: the page that asks, or the decision itself."""

    def __init__(self, records: IdempotencyRecordAdmin, request: HttpRequest, kind: Kind) -> None:
        self.records = records
        self.request = request
        self.kind = kind

    def respond(self, selected: QuerySet[IdempotencyRecord]) -> HttpResponse | None:
        """None sends the person back to the list."""
        if "decided" not in self.request.POST:
            found = list(selected[: MAX_DECIDED + 1])
            limit = 1 if self.kind.single else MAX_DECIDED
            if len(found) > limit:
                self._say(f"{self.kind.title}: select up to {limit} at a time.", messages.ERROR)
                return None
            return self._ask(found, self.kind.form())
        # Not from the selection, which is filtered anew: a record that was resolved meanwhile may not be in it any
        # more, and that has to be said.
        seen = [Seen.parse(token) for token in self.request.POST.getlist("seen")]
        form = self.kind.form(self.request.POST)
        if not form.is_valid():
            return self._ask(list(self._found(seen).values()), form)
        found_now = self._found(seen)
        decided = sum(self._decide(one, found_now.get(one.pk), form) for one in seen[:MAX_DECIDED])
        if decided:
            self._say(f"{self.kind.title}: {decided} record{'' if decided == 1 else 's'}.", messages.SUCCESS)
        return None

    def _found(self, seen: list[Seen]) -> dict[int, IdempotencyRecord]:
        """The records as they are, but in the state that they were seen in."""
        found = self.records.get_queryset(self.request).in_bulk([one.pk for one in seen[:MAX_DECIDED]])
        for one in seen:
            if one.pk in found:
                found[one.pk].attempt, found[one.pk].status = one.attempt, one.status
        return found

    def _decide(self, seen: Seen, record: IdempotencyRecord | None, form: ReasonForm) -> bool:
        if record is None:
            self._say(f"Record {seen.pk} is gone: it was purged.", messages.ERROR)
            return False
        try:
            self.kind.decide(record, form, self.request.user)
        except (IdempotencyError, ImproperlyConfigured, ValueError) as error:
            self._say(str(error), messages.ERROR)
            return False
        return True

    def _say(self, message: str, level: int) -> None:
        self.records.message_user(self.request, message, level)

    def _ask(self, found: list[IdempotencyRecord], form: ReasonForm) -> HttpResponse:
        columns = (self.records.state, lambda record: record.attempt, self.records.age, self.records.lease)
        return page(
            self.records,
            self.request,
            "admin/idempotency/idempotencyrecord/decide.html",
            title=self.kind.title,
            consequence=self.kind.consequence,
            action=self.kind.action,
            seen=[Seen(record.pk, record.attempt, Status(record.status)) for record in found],
            rows=[
                (record.operation, record.account_id, record.idempotency_key, *(of(record) for of in columns))
                for record in found
            ],
            form=form,
        )
