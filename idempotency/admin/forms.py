"""The forms that a person fills in to decide about a record or a message."""

from __future__ import annotations

import json
from typing import Any

from django import forms
from django.http import HttpResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _


class ReasonForm(forms.Form):
    reason = forms.CharField(
        label=_("Reason"),
        max_length=500,
        help_text=_("How you know. The reason is kept in the history and in the log."),
        widget=forms.TextInput(attrs={"class": "vTextField"}),
    )

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the decision, besides ``by``."""
        return self.cleaned_data


class ReleaseForm(ReasonForm):
    force = forms.BooleanField(
        required=False,
        label=_("Live claims too"),
        help_text=_(
            "Only for operations that declare REEXECUTE. The owner loses its lease. What it wrote is rolled back, or "
            "carries the same derived keys as the retry."
        ),
    )


class OutcomeForm(ReasonForm):
    status = forms.IntegerField(label=_("Status"), min_value=200, max_value=599, initial=201)
    content_type = forms.CharField(
        label=_("Content type"),
        max_length=255,
        initial="application/json",
        widget=forms.TextInput(attrs={"class": "vTextField"}),
    )
    body = forms.CharField(
        label=_("Body"),
        required=False,
        strip=False,
        help_text=_("Every retry gets exactly this text."),
        widget=forms.Textarea(attrs={"class": "vLargeTextField", "rows": 10}),
    )
    field_order = ("status", "content_type", "body", "reason")

    def clean_content_type(self) -> str:
        content_type: str = self.cleaned_data["content_type"]
        if not content_type.isprintable() or not content_type.isascii():
            raise forms.ValidationError(gettext("A content type may contain printable ASCII characters only."))
        return content_type

    def clean_body(self) -> str:
        body: str = self.cleaned_data["body"].replace("\r\n", "\n")  # browsers send \r\n at the end of a line
        if "json" in self.cleaned_data.get("content_type", ""):
            try:
                json.loads(body)
            except ValueError as error:
                raise forms.ValidationError(gettext("This is not JSON: %(error)s") % {"error": error}) from error
        return body

    def arguments(self) -> dict[str, Any]:
        data = self.cleaned_data
        response = HttpResponse(data["body"].encode(), status=data["status"], content_type=data["content_type"])
        return {"response_or_result": response, "reason": data["reason"]}
