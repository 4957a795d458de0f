"""Protected views whose handlers do what the test at hand wants; an effect is a row of ``Transfer``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from idempotency import PARK, REEXECUTE, current_claim, idempotent
from testproject.models import Transfer


class Handler:
    """What the views call before and after their effect, and how often they ran."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.before: Callable[[HttpRequest], Any] = lambda request: None
        self.after: Callable[[HttpRequest], Any] = lambda request: None
        self.attempts: list[int] = []


handler = Handler()


def account_of(request: HttpRequest) -> str | None:
    return request.headers.get("X-Account")


def effect(request: HttpRequest) -> HttpResponse:
    claim = current_claim()
    attempt = claim.attempt if claim else 0
    handler.attempts.append(attempt)
    handler.before(request)
    label = json.loads(request.body)["label"]
    transfer = Transfer.objects.create(account_id=int(request.headers["X-Account"]), amount=1, label=label)
    answer = handler.after(request)
    return answer or JsonResponse({"id": transfer.pk, "attempt": attempt}, status=201)


def declared(name: str, **policy: Any) -> Any:
    return idempotent(name, account=account_of, **policy)(effect)


urlpatterns = [
    path("inside/", declared("race.inside")),
    path("park/", declared("race.park", transaction=False, recovery=PARK)),
    path("again/", declared("race.again", transaction=False, recovery=REEXECUTE)),
]
