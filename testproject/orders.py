"""Orders: a charge, and a message to a worker, which sends the receipt.

The protected handler publishes through the outbox, in its own transaction. The unprotected control calls
``apply_async`` in the handler, as many projects do.
"""

from typing import Any

from django.db import transaction
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.decorators import api_view
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.outbox import publish

from .authentication import caller
from .models import MAX_AMOUNT, BaseCharge, Charge, UnprotectedCharge
from .serializers import SOURCES


class CardDeclinedError(APIException):
    """Raised after writing and publishing, so that both must be rolled back."""

    status_code = status.HTTP_402_PAYMENT_REQUIRED
    default_detail = "The card was declined."
    default_code = "card_declined"


class OrderSerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField(read_only=True)
    amount = serializers.IntegerField(min_value=1, max_value=MAX_AMOUNT)
    label: Any = serializers.CharField(max_length=128, allow_blank=True, default="")
    source: Any = serializers.ChoiceField(choices=SOURCES, default="card", write_only=True)


@extend_schema(request=OrderSerializer, responses={201: OrderSerializer})
@api_view(["POST"])
@idempotent("orders.charge")
def create_order(request: Request) -> Response:
    """POST /orders/: published if and only if the order is committed."""
    order = _parsed(request)
    publish("testproject.tasks.send_receipt", _receipt_of(order))
    return _charge(Charge, request, order)


@extend_schema(request=OrderSerializer, responses={201: OrderSerializer})
@api_view(["POST"])
def create_unprotected_order(request: Request) -> Response:
    """POST /unprotected/orders/: the control."""
    from .tasks import send_receipt_unprotected  # imported here, because Celery is optional

    order = _parsed(request)
    with transaction.atomic():
        send_receipt_unprotected.apply_async(kwargs=_receipt_of(order))
        return _charge(UnprotectedCharge, request, order)


def _parsed(request: Request) -> dict[str, Any]:
    serializer = OrderSerializer(data=request.data)
    serializer.is_valid(raise_exception=True)
    order: dict[str, Any] = serializer.validated_data
    return order


def _receipt_of(order: dict[str, Any]) -> dict[str, Any]:
    return {"label": order["label"], "amount": order["amount"]}


def _charge(model: type[BaseCharge], request: Request, order: dict[str, Any]) -> Response:
    charge = model._default_manager.create(
        account=caller(request), label=order["label"], amount=order["amount"], currency="usd"
    )
    if order["source"] == "declined":
        raise CardDeclinedError
    return Response(OrderSerializer(charge).data, status=status.HTTP_201_CREATED)
