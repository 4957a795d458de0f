"""The sample API, and the control, which checks for the effect and then applies it, without a claim."""

from zlib import crc32

from django.conf import settings
from django.http import JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from idempotency import Operation, idempotent, require_claim
from testproject.authentication import caller, token_required
from testproject.forms import json_of
from testproject.models import Transfer
from testproject.provider.client import pay
from testproject.urls import urlpatterns as sample
from tests.harness import answers
from tests.harness.history import CALL_HEADER, EXECUTED, REPLAYED


@csrf_exempt
@require_POST
@token_required
def pay_unless_paid(request):
    label, call = json_of(request)["label"], request.headers[CALL_HEADER]
    made = Transfer.objects.filter(label=label).order_by("pk").first()
    if made is None:
        pay(settings.PROVIDER_URL, call, label=label, amount=1, timeout=settings.PROVIDER_TIMEOUT)
        Transfer.objects.create(account=caller(request), label=label, amount=1, recipient=call)
    answer = JsonResponse({"label": label, "call": call if made is None else made.recipient}, status=201)
    answer["Idempotency-Status"] = EXECUTED if made is None else REPLAYED
    return answer


@csrf_exempt
@require_POST
@token_required
@idempotent(Operation.declare("soak.drawn", **answers.DECLARED))
def answer_as_drawn(request):
    """Write a row. The label determines the kind of answer."""
    label = json_of(request)["label"]
    Transfer.objects.create(account=caller(request), label=label, amount=1, recipient="drawn")
    kind = answers.draw(answers.KEPT, crc32(label.encode()))
    return answers.answer(require_claim(), kind, call=request.headers[CALL_HEADER], label=label)


urlpatterns = [*sample, path("control/", pay_unless_paid), path("drawn/", answer_as_drawn)]
