"""The endpoints of the sample API. Each shows a way to protect a view, except for the unprotected controls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe
from rest_framework import mixins, status, viewsets
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.contrib.rest_framework import IdempotentMixin

from .authentication import caller, token_required
from .exports import answer_of, start_export
from .models import MAX_AMOUNT, BaseCharge, Charge, Export, Notification, Transfer, UnprotectedCharge
from .operations import EXPORT, PAYOUT, PAYOUT_PARKED, PAYOUT_REEXECUTED
from .payloads import InvalidPayloadError, one_of, parse_object, text, whole_number
from .payouts import pay_out, pay_out_unprotected
from .provider.faults import FAULTS
from .serializers import ChargeSerializer, UnprotectedChargeSerializer


class BaseChargeViewSet(
    mixins.CreateModelMixin, mixins.RetrieveModelMixin, mixins.ListModelMixin, viewsets.GenericViewSet[Any]
):
    """Create a charge, and read one's own charges. This class has no protection."""

    model: ClassVar[type[BaseCharge]]
    detail_route: ClassVar[str]
    lookup_value_regex = "[0-9]{1,18}"

    def get_queryset(self) -> QuerySet[Any]:
        return self.model._default_manager.filter(account_id=self.request.user.pk).order_by("pk")

    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        source = serializer.validated_data.pop("source")
        _talk_to_the_card_network()
        if source == "declined":
            refusal = {"detail": "The card was declined.", "code": "card_declined"}
            return Response(refusal, status=status.HTTP_402_PAYMENT_REQUIRED)
        try:
            charge = serializer.save(account=request.user)
        except IntegrityError as error:
            # Another request has used the reference since it was validated.
            raise ValidationError({"reference": ["charge with this reference already exists."]}) from error
        _talk_to_the_card_network()
        location = reverse(self.detail_route, args=[charge.pk])
        return Response(serializer.data, status=status.HTTP_201_CREATED, headers={"Location": location})


def _talk_to_the_card_network() -> None:
    """Wait for half of ``PROCESSING_SECONDS``. Called before and after the effect."""
    if settings.PROCESSING_SECONDS:
        time.sleep(settings.PROCESSING_SECONDS / 2)


class ChargeViewSet(IdempotentMixin, BaseChargeViewSet):
    """POST /charges/"""

    model = Charge
    detail_route = "charge-detail"
    serializer_class = ChargeSerializer
    idempotent_operations: ClassVar = {"create": "charges.create"}


class UnprotectedChargeViewSet(BaseChargeViewSet):
    """POST /unprotected/charges/: the control."""

    model = UnprotectedCharge
    detail_route = "unprotected-charge-detail"
    serializer_class = UnprotectedChargeSerializer


@csrf_exempt  # callers authenticate by a token, which a browser does not send automatically
@require_POST
@token_required
@idempotent("transfers.create")
def create_transfer(request: HttpRequest) -> HttpResponse:
    """POST /transfers/: a plain view."""
    try:
        payload = parse_object(request.body)
        recipient = text(payload, "recipient", max_length=64)
        amount = whole_number(payload, "amount", minimum=1, maximum=MAX_AMOUNT)
        label = text(payload, "label", max_length=128, default="")
    except InvalidPayloadError as error:
        return error.as_response()
    transfer = Transfer.objects.create(account=caller(request), recipient=recipient, amount=amount, label=label)
    created = {"id": transfer.pk, "recipient": recipient, "amount": amount, "label": label}
    return JsonResponse(created, status=201)


@csrf_exempt
@require_POST
@token_required
@idempotent("notifications.create")
async def create_notification(request: HttpRequest) -> HttpResponse:
    """POST /notifications/: an async view."""
    try:
        payload = parse_object(request.body)
        recipient = text(payload, "recipient", max_length=64)
        message = text(payload, "message", max_length=10_000)
        label = text(payload, "label", max_length=128, default="")
    except InvalidPayloadError as error:
        return error.as_response()
    notification = await Notification.objects.acreate(
        account=caller(request), recipient=recipient, message=message, label=label
    )
    created = {"id": notification.pk, "recipient": recipient, "message": message, "label": label}
    return JsonResponse(created, status=201)


@csrf_exempt
@require_POST
@token_required
@idempotent(PAYOUT)
def create_payout(request: HttpRequest) -> HttpResponse:
    """POST /payouts/: an effect at a provider, which is asked after a crash."""
    return _payout(request, pay_out, settings.PROVIDER_URL)


@csrf_exempt
@require_POST
@token_required
@idempotent(PAYOUT_REEXECUTED)
def create_payout_reexecuted(request: HttpRequest) -> HttpResponse:
    """POST /payouts/reexecute/: the provider deduplicates, so a retry simply pays again."""
    return _payout(request, pay_out, settings.DEDUPLICATING_PROVIDER_URL)


@csrf_exempt
@require_POST
@token_required
@idempotent(PAYOUT_PARKED)
def create_payout_parked(request: HttpRequest) -> HttpResponse:
    """POST /payouts/park/: a payout that was cut off waits for a person."""
    return _payout(request, pay_out, settings.PROVIDER_URL)


@csrf_exempt
@require_POST
@token_required
def create_unprotected_payout(request: HttpRequest) -> HttpResponse:
    """POST /unprotected/payouts/: the control."""
    return _payout(request, pay_out_unprotected, settings.PROVIDER_URL)


def _payout(request: HttpRequest, make: Callable[..., HttpResponse], provider: str) -> HttpResponse:
    try:
        payload = parse_object(request.body)
        amount = whole_number(payload, "amount", minimum=1, maximum=MAX_AMOUNT)
        label = text(payload, "label", max_length=128, default="")
        # A real API has no such field. It is passed on to the stand-in provider, which then fails in that way.
        fault = one_of(payload, "fault", FAULTS, default="")
    except InvalidPayloadError as error:
        return error.as_response()
    return make(caller(request).pk, label, amount, fault, provider)


@csrf_exempt
@require_POST
@token_required
@idempotent(EXPORT)
def create_export(request: HttpRequest) -> HttpResponse:
    """POST /exports/: a job, to which duplicates attach."""
    try:
        label = text(parse_object(request.body), "label", max_length=128, default="")
    except InvalidPayloadError as error:
        return error.as_response()
    return start_export(caller(request).pk, label)


@require_safe
@token_required
def show_export(request: HttpRequest, pk: UUID) -> HttpResponse:
    """GET /exports/<id>/: the state of the export. An export of another account is not found."""
    return answer_of(get_object_or_404(Export, pk=pk, account=caller(request)))


def health(request: HttpRequest) -> HttpResponse:
    """GET /health/: the server is running. This does not use the database."""
    return JsonResponse({"status": "ok"})
