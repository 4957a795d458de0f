"""Payments: a call to a provider that deduplicates, and then a row. The handler of ``/payments/`` shows ``begin()``.

The control is protected as well, and sends the same derived key. It only leaves ``begin()`` out, so its row commits
before the outcome. If the process dies in between, the next attempt charges nothing again, but writes another row.
"""

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_POST

from idempotency import REEXECUTE, Claim, idempotent, require_claim

from .authentication import caller, token_required
from .forms import PayoutForm, json_of
from .models import BaseCharge, Charge, UnprotectedCharge
from .provider.client import PayoutRefusedError, ProviderFailedError, pay


@require_POST
@token_required
@idempotent("payments.create", transaction=False, recovery=REEXECUTE)
def create_payment(request: HttpRequest) -> HttpResponse:
    """POST /payments/: the row is committed together with the outcome."""
    claim = require_claim()
    payment = _charge(request, claim)
    if isinstance(payment, HttpResponse):
        return payment
    claim.begin()
    return _created(Charge, request, payment)


@require_POST
@token_required
@idempotent("payments.control", transaction=False, recovery=REEXECUTE)
def create_payment_without_begin(request: HttpRequest) -> HttpResponse:
    """POST /unprotected/payments/: the control."""
    payment = _charge(request, require_claim())
    return payment if isinstance(payment, HttpResponse) else _created(UnprotectedCharge, request, payment)


def _charge(request: HttpRequest, claim: Claim) -> dict[str, Any] | HttpResponse:
    """Charge at the provider. Returns the values of the payment's row, or the response if nothing is to be written."""
    form = PayoutForm(json_of(request))
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    key = str(claim.derive_key("provider.charge"))
    try:
        effect = pay(settings.DEDUPLICATING_PROVIDER_URL, key, timeout=settings.PROVIDER_TIMEOUT, **form.cleaned_data)
    except PayoutRefusedError as error:
        return JsonResponse({"detail": str(error), "code": "payment_refused"}, status=402)
    except ProviderFailedError as error:
        return JsonResponse({"detail": str(error), "code": "provider_failed"}, status=502)
    return {"label": effect.label, "amount": effect.amount, "currency": "usd"}


def _created(model: type[BaseCharge], request: HttpRequest, payment: dict[str, Any]) -> HttpResponse:
    row = model._default_manager.create(account=caller(request), **payment)
    return JsonResponse({"id": row.pk, **payment}, status=201)
