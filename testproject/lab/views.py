"""The page of the retry lab, and what its buttons call."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_POST, require_safe

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.models import MAX_AMOUNT, BaseCharge, Charge, UnprotectedCharge
from testproject.payloads import InvalidPayloadError, parse_object, text, whole_number

OPERATION = "lab.pay"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
LONGEST = 10_000  # milliseconds of latency

#: Who has charged. The lab has no accounts of its own, and its visitors are told apart by their sessions.
PAYER = "lab"


def visitor(request: HttpRequest) -> str | None:
    """The account of a visitor, from the session. None if the page was never shown to this browser."""
    name: str | None = request.session.get("lab_visitor")
    return name


@require_safe
@never_cache
@ensure_csrf_cookie
def show_lab(request: HttpRequest) -> HttpResponse:
    """GET /lab/: the page. It gives the visitor an identity and a cart before the first request that pays."""
    request.session.setdefault("lab_visitor", uuid4().hex)
    cart = request.session.setdefault("lab_cart", uuid4().hex)
    response = render(request, "lab/lab.html", {"cart": cart, "kills": settings.LAB_KILLS})
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    return response


@require_POST
def take_new_cart(request: HttpRequest) -> HttpResponse:
    """POST /lab/cart/: another thing to pay for, which has a key of its own."""
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
    try:
        payload = parse_object(request.body)
        cart = text(payload, "cart", max_length=64)
        amount = whole_number(payload, "amount", minimum=1, maximum=MAX_AMOUNT)
    except InvalidPayloadError as error:
        return error.as_response()
    payer, _ = User.objects.get_or_create(username=PAYER)
    # The conditions are headers, because they may change between attempts and are no part of what is asked for.
    pause = min(_number(request, "Lab-Latency"), LONGEST) / 2000
    time.sleep(pause)
    charge: Any = model._default_manager.create(account=payer, label=cart, amount=amount, currency="usd")
    if settings.LAB_KILLS and _number(request, "Lab-Kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(pause)
    return JsonResponse({"charge": charge.pk, "amount": amount}, status=201)


def _number(request: HttpRequest, header: str) -> int:
    value = request.headers.get(header, "0")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0


@require_safe
@never_cache
def show_state(request: HttpRequest) -> HttpResponse:
    """GET /lab/state/: the effects for the visitor's cart, counted in the database, and the visitor's newest record."""
    cart = request.session.get("lab_cart", "")
    record = IdempotencyRecord.objects.filter(account_id=visitor(request) or "", operation=OPERATION).last()
    return JsonResponse(
        {
            "protected": Charge.objects.filter(label=cart).count() if cart else 0,
            "unprotected": UnprotectedCharge.objects.filter(label=cart).count() if cart else 0,
            "record": None if record is None else {"status": record.status, "attempt": record.attempt},
        }
    )
