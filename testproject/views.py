"""The sample API's endpoints. Each shows a way to protect a view, except for the unprotected control."""

from typing import Any, ClassVar
from uuid import UUID

from django.conf import settings
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe
from rest_framework import mixins, status, viewsets
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.contrib.rest_framework import IdempotentMixin

from .authentication import caller, token_required
from .exports import answer_of, start_export
from .forms import ExportForm, NotificationForm, PayoutForm, TransferForm, json_of
from .models import BaseCharge, Charge, Export, UnprotectedCharge
from .operations import EXPORT, PAYOUT, PAYOUT_PARKED, PAYOUT_REEXECUTED
from .payouts import pay_out
from .serializers import ChargeSerializer, UnprotectedChargeSerializer


class BaseChargeViewSet(
    mixins.CreateModelMixin, mixins.RetrieveModelMixin, mixins.ListModelMixin, viewsets.GenericViewSet[Any]
):
    """Creates a charge, and returns the caller's charges. Unprotected."""

    model: ClassVar[type[BaseCharge]]
    detail_route: ClassVar[str]
    lookup_value_regex = "[0-9]{1,18}"

    def get_queryset(self) -> QuerySet[Any]:
        return self.model._default_manager.filter(account_id=self.request.user.pk).order_by("pk")

    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        if serializer.validated_data.pop("source") == "declined":
            refusal = {"detail": "The card was declined.", "code": "card_declined"}
            return Response(refusal, status=status.HTTP_402_PAYMENT_REQUIRED)
        charge = serializer.save(account=request.user)
        location = reverse(self.detail_route, args=[charge.pk])
        return Response(serializer.data, status=status.HTTP_201_CREATED, headers={"Location": location})


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


@require_POST
@token_required
@idempotent("transfers.create")
def create_transfer(request: HttpRequest) -> HttpResponse:
    """POST /transfers/: a plain view."""
    form = TransferForm(json_of(request))
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    form.instance.account = caller(request)
    transfer = form.save()
    return JsonResponse({"id": transfer.pk, **form.cleaned_data}, status=201)


@require_POST
@token_required
@idempotent("notifications.create")
async def create_notification(request: HttpRequest) -> HttpResponse:
    """POST /notifications/: an async view."""
    form = NotificationForm(json_of(request))
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    form.instance.account = caller(request)
    await form.instance.asave()
    return JsonResponse({"id": form.instance.pk, **form.cleaned_data}, status=201)


@require_POST
@token_required
@idempotent(PAYOUT)
def create_payout(request: HttpRequest) -> HttpResponse:
    """POST /payouts/: an effect at a provider, which is queried after a crash."""
    return _payout(request, settings.PROVIDER_URL)


@require_POST
@token_required
@idempotent(PAYOUT_REEXECUTED)
def create_payout_reexecuted(request: HttpRequest) -> HttpResponse:
    """POST /payouts/reexecute/: the provider deduplicates, so a retry simply calls it again."""
    return _payout(request, settings.DEDUPLICATING_PROVIDER_URL)


@require_POST
@token_required
@idempotent(PAYOUT_PARKED)
def create_payout_parked(request: HttpRequest) -> HttpResponse:
    """POST /payouts/park/: an interrupted payout waits for an operator."""
    return _payout(request, settings.PROVIDER_URL)


def _payout(request: HttpRequest, provider: str) -> HttpResponse:
    form = PayoutForm(json_of(request))
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    return pay_out(caller(request).pk, provider, **form.cleaned_data)


@require_POST
@token_required
@idempotent(EXPORT)
def create_export(request: HttpRequest) -> HttpResponse:
    """POST /exports/: starts a job. Duplicates attach to it."""
    form = ExportForm(json_of(request))
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    return start_export(caller(request).pk, form.cleaned_data["label"])


@require_safe
@token_required
def show_export(request: HttpRequest, pk: UUID) -> HttpResponse:
    """GET /exports/<id>/: the state of an export. Returns 404 for other accounts' exports."""
    return answer_of(get_object_or_404(Export, pk=pk, account=caller(request)))


def health(request: HttpRequest) -> HttpResponse:
    """GET /health/: the server is running. Does not use the database."""
    return JsonResponse({"status": "ok"})
