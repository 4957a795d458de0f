"""The mixin protects the handlers that it names, wherever it stands among the bases and whatever inherits from it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, effects
from tests.http.declaring import Creating, Declaring, EveryMethod, runs_once
from tests.http.serving import Serve
from tests.http.views import Methods, async_answer

# Whether a method is protected is decided before the database is asked.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.once]


class SkipsInitial:
    """As a project's base class that does by itself what ``initial()`` does."""

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.perform_authentication(request)  # type: ignore[attr-defined]


class SkipsDispatch:
    """As a base class that logs, or catches what its handlers raise, and calls them by itself."""

    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.headers: dict[str, str] = {}
        self.args, self.kwargs = args, kwargs
        self.request = request = self.initialize_request(request, *args, **kwargs)  # type: ignore[attr-defined]
        self.initial(request, *args, **kwargs)  # type: ignore[attr-defined]
        response = getattr(self, request.method.lower())(request, *args, **kwargs)
        return self.finalize_response(request, response, *args, **kwargs)  # type: ignore[attr-defined]


BASES = {
    "first": (Declaring, Methods, APIView),
    "last": (Methods, APIView, Declaring),
    "behind an initial() of the project": (SkipsInitial, Declaring, Methods, APIView),
    "behind a dispatch() of the project": (SkipsDispatch, Declaring, Methods, APIView),
    "decorated": (Creating, APIView),
    "of a plain view": (Declaring, EveryMethod, View),
}


@pytest.mark.parametrize("bases", BASES.values(), ids=BASES)
def test_a_mixin_protects_wherever_it_stands(alice: Caller, serve: Serve, bases: Any, atomic: bool) -> None:
    view: Any = type("Mixed", bases, {})
    serve(view.as_view())
    assert runs_once(alice, "POST")
    # What isn't protected has its transaction still.
    assert alice.request("PUT", "/?crash=1").status_code == 500
    assert effects() == (1 if atomic else 2)


def test_a_mixin_protects_an_inherited_async_handler(alice: Caller, serve: Serve, transport: str) -> None:
    class Answering(View):
        async def post(self, request: HttpRequest) -> HttpResponse:
            return await async_answer(request)

    class Protected(Declaring, Answering):
        pass

    alice.transport = transport
    serve(Protected.as_view())
    assert Protected.view_is_async
    assert runs_once(alice, "POST")


def test_an_async_handler_may_have_a_decorator_below_its_protection(
    alice: Caller, serve: Serve, transport: str
) -> None:
    class Decorated(View):
        @idempotent("tests.decorated")
        @method_decorator(never_cache)
        async def post(self, request: HttpRequest) -> HttpResponse:
            return await async_answer(request)

    alice.transport = transport
    serve(Decorated.as_view())
    assert runs_once(alice, "POST")


def test_a_handler_of_a_mixin_in_between_is_called_in_its_turn(alice: Caller, serve: Serve) -> None:
    class Protected(Declaring, Methods, APIView):
        pass

    class Noting(Methods):
        def post(self, request: Request) -> Response:
            noted.append(type(self).__name__)
            return super().post(request)

    class Both(Protected, Noting):
        pass

    noted: list[str] = []
    serve(Both.as_view())
    assert runs_once(alice, "POST")
    assert noted == ["Both"]


def test_a_subclass_may_give_a_handler_of_the_mixin_to_another_operation(alice: Caller, serve: Serve) -> None:
    class First(Declaring, Methods, APIView):
        pass

    class Second(First):
        idempotent_operations: ClassVar = {"post": "tests.second"}

    class Third(Second):
        def post(self, request: Request) -> Response:
            return super().post(request)

    serve(First.as_view(), **{"second/": Second.as_view(), "third/": Third.as_view()})
    assert runs_once(alice, "POST")
    assert runs_once(alice, "POST", "/second/")
    assert runs_once(alice, "POST", "/third/")
    names = IdempotencyRecord.objects.order_by("pk").values_list("operation", flat=True)
    assert list(names) == ["tests.declaring", "tests.second", "tests.second"]
