"""The retry lab's page, and the endpoints that its buttons call."""

import re
import time
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_POST, require_safe

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.forms import PaymentForm, json_of
from testproject.models import BaseCharge, Charge, UnprotectedCharge

OPERATION = "lab.pay"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
LONGEST = 10_000  # milliseconds of latency

#: The user who makes the charges. The lab has no accounts: sessions identify its visitors.
PAYER = "lab"


def visitor(request: HttpRequest) -> str | None:
    """The visitor's account, from the session. None if the browser has never loaded the page."""
    name: str | None = request.session.get("lab_visitor")
    return name


@require_safe
@never_cache
@ensure_csrf_cookie
def show_lab(request: HttpRequest) -> HttpResponse:
    """GET /lab/: the page. Creates the visitor's identity and cart, before the first payment."""
    request.session.setdefault("lab_visitor", uuid4().hex)
    cart = request.session.setdefault("lab_cart", uuid4().hex)
    sides = [("protected", "With an Idempotency-Key"), ("unprotected", "Unprotected")]
    response = render(request, "lab/lab.html", {"cart": cart, "sides": sides})
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    return response


@require_POST
def take_new_cart(request: HttpRequest) -> HttpResponse:
    """POST /lab/cart/: a new cart, which gets a new key."""
    request.session["lab_cart"] = uuid4().hex
    return redirect("lab")


@require_POST
@idempotent(OPERATION, account=visitor)
def pay(request: HttpRequest) -> HttpResponse:
    """POST /lab/pay/"""
    return _pay(request, Charge)


@require_POST
def pay_unprotected(request: HttpRequest) -> HttpResponse:
    """POST /lab/unprotected/pay/: the control."""
    return _pay(request, UnprotectedCharge)


def _pay(request: HttpRequest, model: type[BaseCharge]) -> HttpResponse:
    form = PaymentForm(json_of(request))
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    cart, amount = form.cleaned_data["cart"], form.cleaned_data["amount"]
    payer, _ = User.objects.get_or_create(username=PAYER)
    # A header, because it may change between attempts and is not part of the payload.
    latency = request.headers.get("Lab-Latency", "")
    pause = min(int(latency), LONGEST) / 2000 if re.fullmatch("[0-9]{1,9}", latency) else 0
    time.sleep(pause)
    charge: Any = model._default_manager.create(account=payer, label=cart, amount=amount, currency="usd")
    time.sleep(pause)
    return JsonResponse({"charge": charge.pk, "amount": amount}, status=201)


@require_safe
@never_cache
def show_state(request: HttpRequest) -> HttpResponse:
    """GET /lab/state/: the number of effects for the visitor's cart, and the visitor's latest record."""
    cart = request.session.get("lab_cart", "")
    record = IdempotencyRecord.objects.filter(account_id=visitor(request) or "", operation=OPERATION).last()
    return JsonResponse(
        {
            "protected": Charge.objects.filter(label=cart).count() if cart else 0,
            "unprotected": UnprotectedCharge.objects.filter(label=cart).count() if cart else 0,
            "record": None if record is None else {"status": record.status, "attempt": record.attempt},
        }
    )
