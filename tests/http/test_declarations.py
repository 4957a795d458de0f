"""What is declared as protected is protected, or refused when it is declared."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.http import HttpRequest, HttpResponse
from django.views import View
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, effects
from tests.http.declaring import Writing, refused, runs_once
from tests.http.views import UndecoratedView, drf_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(62)]


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
    "first": (IdempotentMixin, Writing, APIView),
    "last": (Writing, APIView, IdempotentMixin),
    "behind an initial() of the project": (SkipsInitial, IdempotentMixin, Writing, APIView),
    "behind a dispatch() of the project": (SkipsDispatch, IdempotentMixin, Writing, APIView),
}


@pytest.mark.parametrize("atomic", [False, True], ids=["", "ATOMIC_REQUESTS"])
@pytest.mark.parametrize("bases", BASES.values(), ids=BASES)
def test_a_mixin_protects_wherever_it_stands(
    alice: Caller, serve: Serve, request: pytest.FixtureRequest, bases: tuple[type, ...], atomic: bool
) -> None:
    if atomic:
        request.getfixturevalue("atomic_requests")
    view: Any = type("Mixed", bases, {"idempotent_operations": {"post": "tests.mixin"}})
    serve(view.as_view())
    assert runs_once(alice, "POST")
    assert IdempotencyRecord.objects.get().operation == "tests.mixin"
    # What isn't protected has its transaction still.
    assert alice.request("PUT", "/?crash=1").status_code == 500
    assert effects() == (1 if atomic else 2)


def test_the_mixin_protects_a_plain_view(alice: Caller, serve: Serve) -> None:
    class Plain(IdempotentMixin, UndecoratedView):
        idempotent_operations: ClassVar = {"post": "tests.plain"}

    serve(Plain.as_view())
    assert runs_once(alice, "POST")
    assert not runs_once(alice, "GET")


def test_a_mixin_of_ones_own_passes_the_protection_on(alice: Caller, serve: Serve, atomic_requests: None) -> None:
    class Creating:
        @idempotent("tests.creating")
        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        def put(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    class Declaring(IdempotentMixin):
        idempotent_operations: ClassVar = {"post": "tests.declaring"}

    class Decorated(Creating, View):
        pass

    class Mixed(Declaring, Writing, APIView):
        pass

    serve(Decorated.as_view(), **{"mixin/": Mixed.as_view()})
    for url in ("/", "/mixin/"):
        assert runs_once(alice, "POST", url)
        written = effects()
        assert alice.request("PUT", f"{url}?crash=1").status_code == 500
        assert effects() == written


def test_a_handler_that_is_replaced_later_is_protected(alice: Caller, serve: Serve, monkeypatch: Any) -> None:
    class Mixed(IdempotentMixin, Writing, APIView):
        idempotent_operations: ClassVar = {"post": "tests.replaced"}

    class HasItsOwnNew(Mixed):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls, *args, **kwargs)

    serve(Mixed.as_view(), **{"new/": HasItsOwnNew.as_view(http_method_names=["post"])})
    assert runs_once(alice, "POST")
    monkeypatch.setattr(Mixed, "post", lambda self, request: drf_answer(request))
    IdempotencyRecord.objects.all().delete()
    assert runs_once(alice, "POST")
    IdempotencyRecord.objects.all().delete()
    assert runs_once(alice, "POST", "/new/")


def test_the_mixin_calls_the_base_classes_own_new(alice: Caller, serve: Serve) -> None:
    class Counting(Writing):
        made: ClassVar[list[dict[str, Any]]] = []

        def __new__(cls, **initkwargs: Any) -> Any:
            cls.made.append(initkwargs)
            return super().__new__(cls)

    class Mixed(IdempotentMixin, Counting, APIView):
        idempotent_operations: ClassVar = {"post": "tests.counted"}

    serve(Mixed.as_view(http_method_names=["post"]))
    assert runs_once(alice, "POST")
    assert Counting.made == [{"http_method_names": ["post"]}] * 3


def test_wrong_mappings_are_refused() -> None:
    with refused("must map the names of handlers to operations"):

        class Listed(IdempotentMixin, APIView):
            idempotent_operations: ClassVar = ["post"]

    with refused("before authentication"):

        class Dispatching(IdempotentMixin, Writing, APIView):
            idempotent_operations: ClassVar = {"dispatch": "tests.dispatch"}

    with refused("'tests.mixin', and @idempotent on the method gives it to 'tests.decorator'"):

        class Twice(IdempotentMixin, APIView):
            idempotent_operations: ClassVar = {"post": "tests.mixin"}

            @idempotent("tests.decorator")
            def post(self, request: Request) -> Response:
                return drf_answer(request)

    class Mixed(IdempotentMixin, Writing, APIView):
        pass

    with refused("is an attribute of the class Mixed, not an argument of as_view()"):
        Mixed.as_view(idempotent_operations={"post": "tests.late"})
