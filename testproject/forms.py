"""Forms that validate the plain views' JSON bodies."""

import json
from typing import Any

from django import forms
from django.core.exceptions import BadRequest
from django.forms.models import modelform_factory
from django.http import HttpRequest

from .models import MAX_AMOUNT, Export, Notification, Transfer
from .provider.faults import FAULTS

TransferForm = modelform_factory(Transfer, fields=["recipient", "amount", "label"])
NotificationForm = modelform_factory(Notification, fields=["recipient", "message", "label"])
ExportForm = modelform_factory(Export, fields=["label"])


def json_of(request: HttpRequest) -> dict[str, Any]:
    """The request's JSON object.

    :raises BadRequest: the body is not a JSON object. Django responds with 400.
    """
    try:
        parsed = json.loads(request.body)
        # An escaped lone surrogate is valid JSON, but neither a database nor a response can encode it.
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest("The body is not valid JSON.") from error
    if not isinstance(parsed, dict):
        raise BadRequest("The body must be a JSON object.")
    return parsed


class PayoutForm(forms.Form):
    amount = forms.IntegerField(min_value=1, max_value=MAX_AMOUNT)
    label = forms.CharField(max_length=128, required=False)
    # Only for the stand-in provider: the fault that it simulates.
    fault = forms.ChoiceField(choices=[("", ""), *((fault, fault) for fault in FAULTS)], required=False)


class PaymentForm(forms.Form):
    """The payload of the retry lab."""

    cart = forms.CharField(max_length=64)
    amount = forms.IntegerField(min_value=1, max_value=MAX_AMOUNT)
