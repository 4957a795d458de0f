"""The types of decorated views. mypy checks this file; nothing runs it.

Each wrong call has an ``ignore``. mypy reports an ``ignore`` that it doesn't need.
"""

from __future__ import annotations

from typing import assert_type

from django.http import HttpRequest, JsonResponse
from django.views import View

from idempotency import idempotent, require_claim


@idempotent("typed.function")
def pay(request: HttpRequest, amount: int, *, note: str = "") -> JsonResponse:
    assert_type(require_claim().attempt, int)
    return JsonResponse({})


@idempotent("typed.async")
async def pay_later(request: HttpRequest) -> JsonResponse:
    return JsonResponse({})


class Method(View):
    @idempotent("typed.method")
    def post(self, request: HttpRequest, pk: int) -> JsonResponse:
        return JsonResponse({})


def use(request: HttpRequest) -> None:
    assert_type(pay(request, 1, note="a"), JsonResponse)
    assert_type(Method().post(request, pk=1), JsonResponse)
    pay(request, "1")  # type: ignore[arg-type]
    pay(request, 1, remark="a")  # type: ignore[call-arg]
    Method().post(request)  # type: ignore[call-arg]


async def use_async(request: HttpRequest) -> None:
    assert_type(await pay_later(request), JsonResponse)
