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

from idempotency import REEXECUTE, idempotent
from testproject.authentication import token_required
from testproject.models import Transfer
from testproject.views import health
from tests.benchmarks import views

AsyncView = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]


async def create_slowly(request: HttpRequest) -> HttpResponse:
    """Waits, as for another service, and then creates one row."""
    await asyncio.sleep(settings.BENCHMARK_SLOW_SECONDS)
    transfer = await Transfer.objects.acreate(account_id=request.user.pk, recipient="acct_1", amount=1250)
    return JsonResponse({"id": transfer.pk}, status=201)


def without_query(view: AsyncView) -> AsyncView:
    """Authentication that needs no database, such as a signed token: it names the account."""

    async def authenticated(request: HttpRequest) -> HttpResponse:
        request.user = User(pk=int(request.headers["Authorization"].rpartition(" ")[2]))
        return await view(request)

    return authenticated


protected = idempotent("benchmarks.slow")(create_slowly)
in_autocommit = idempotent("benchmarks.slow_autocommit", transaction=False, recovery=REEXECUTE)(create_slowly)

urlpatterns = [
    path("health/", health),
    path("bare/", views.BareAtomicView.as_view()),
    path("handwritten/", views.HandwrittenView.as_view()),
    path("package/", views.PackageView.as_view()),
    path("slow/bare/", csrf_exempt(without_query(create_slowly))),
    path("slow/bare/after-a-query/", csrf_exempt(token_required(create_slowly))),
    path("slow/package/", csrf_exempt(without_query(protected))),
    path("slow/package/after-a-query/", csrf_exempt(token_required(protected))),
    path("slow/package/autocommit/", csrf_exempt(without_query(in_autocommit))),
]
