"""Where the compared views are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency import REEXECUTE, Operation, idempotent
from testproject.models import Transfer
from testproject.views import health
from tests.benchmarks import views

AsyncView = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]


async def wait_and_create(request: HttpRequest) -> HttpResponse:
    """Waits, as for another service, and then creates one row."""
    await asyncio.sleep(settings.BENCHMARK_SLOW_SECONDS)
    return await _create(request)


async def create_and_wait(request: HttpRequest) -> HttpResponse:
    """Creates one row before it waits."""
    response = await _create(request)
    await asyncio.sleep(settings.BENCHMARK_SLOW_SECONDS)
    return response


async def _create(request: HttpRequest) -> HttpResponse:
    transfer = await Transfer.objects.acreate(account_id=request.user.pk, recipient="acct_1", amount=1250)
    return JsonResponse({"id": transfer.pk}, status=201)


def signed_in(view: AsyncView) -> Any:
    """The request names its account, as in a signed token, which needs no query."""

    async def authenticated(request: HttpRequest) -> HttpResponse:
        request.user = User(pk=int(request.headers["Authorization"].rpartition(" ")[2]))
        return await view(request)

    return csrf_exempt(authenticated)


in_autocommit = Operation("benchmarks.autocommit", transaction=False, recovery=REEXECUTE)

urlpatterns = [
    path("health/", health),
    path("bare/", views.BareAtomicView.as_view()),
    path("handwritten/", views.HandwrittenView.as_view()),
    path("package/", views.PackageView.as_view()),
    path("slow/bare/", signed_in(wait_and_create)),
    path("slow/bare/query-first/", signed_in(create_and_wait)),
    path("slow/package/", signed_in(idempotent("benchmarks.waiting")(wait_and_create))),
    path("slow/package/query-first/", signed_in(idempotent("benchmarks.creating")(create_and_wait))),
    path("slow/package/autocommit/", signed_in(idempotent(in_autocommit)(create_and_wait))),
]
