"""One name of an operation belongs to one function, and one view in two places is two operations."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework import viewsets
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import Operation, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from testproject.models import Transfer
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.declaring import Writing, refused
from tests.http.views import UndecoratedView, WorkingModelViewSet, drf_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(62)]


# One name, one function


def other(request: HttpRequest) -> HttpResponse:
    return plain_answer(request)


@pytest.mark.failure_mode(66)
def test_a_second_function_under_a_bare_name_is_refused() -> None:
    idempotent("tests.shared")(plain_answer)
    idempotent("tests.shared")(plain_answer)  # a module that is loaded again declares the same again
    with refused(
        "'tests.shared' is declared for tests.http.test_operation_names.other, and for tests.http.views.plain"
    ):
        idempotent("tests.shared")(other)
    with refused("'tests.shared' is declared for"):
        api_view(["POST"])(idempotent("tests.shared")(drf_answer))
    with refused("'tests.shared' is declared for"):
        idempotent("tests.shared")(UndecoratedView.as_view())
    with refused("'tests.shared' is declared for"):

        class Decorated(View):
            @idempotent("tests.shared")
            def post(self, request: HttpRequest) -> HttpResponse:
                return plain_answer(request)

    with refused("'tests.shared' is declared for"):

        class Mixed(IdempotentMixin, Writing, APIView):
            idempotent_operations: ClassVar = {"post": "tests.shared"}

    with refused("'tests.policy' is declared for"):
        idempotent("tests.policy", required=False)(plain_answer)
        idempotent("tests.policy", required=False)(other)


@pytest.mark.failure_mode(66)
def test_partial_applications_are_the_function_that_they_apply() -> None:
    idempotent("tests.partial")(partial(plain_answer))
    idempotent("tests.partial")(partial(partial(plain_answer)))
    with refused("'tests.partial' is declared for"):
        idempotent("tests.partial")(partial(drf_answer))


@pytest.mark.failure_mode(66)
def test_two_classes_and_two_handlers_are_two_functions() -> None:
    idempotent("tests.classes")(UndecoratedView.as_view())
    with refused("Asking"):
        idempotent("tests.classes")(type("Asking", (UndecoratedView,), {}).as_view())

    class First(IdempotentMixin, WorkingModelViewSet):
        idempotent_operations: ClassVar = {"create": "tests.create"}

    with refused("'tests.create' is declared for"):

        class Second(IdempotentMixin, WorkingModelViewSet):
            idempotent_operations: ClassVar = {"create": "tests.create"}

    with refused("'tests.twice' is declared for"):

        class Both(IdempotentMixin, WorkingModelViewSet):
            idempotent_operations: ClassVar = {"create": "tests.twice", "pay": "tests.twice"}


@pytest.mark.failure_mode(66)
def test_a_subclass_belongs_to_the_operation_of_its_parent() -> None:
    class Parent(IdempotentMixin, WorkingModelViewSet):
        idempotent_operations: ClassVar = {"create": "tests.create"}

        @idempotent("tests.pay")
        def pay(self, request: Request) -> Response:
            return drf_answer(request)

    class Inherits(Parent):
        pass

    class Overrides(Parent):
        idempotent_operations: ClassVar = {"create": "tests.create"}

        @idempotent("tests.pay")
        def pay(self, request: Request) -> Response:
            return super().pay(request)

    assert Inherits.as_view({"post": "create"})
    assert Overrides.as_view({"post": "create"})


@pytest.mark.failure_mode(66)
def test_a_method_that_another_decorator_hides_is_refused_at_its_first_call(alice: Caller, serve: Serve) -> None:
    idempotent("tests.hidden")(plain_answer)
    decorate = idempotent("tests.hidden")

    class Hidden(View):
        @method_decorator(never_cache)
        @idempotent("tests.hidden")
        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        @method_decorator(decorate)
        def put(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    serve(Hidden.as_view())
    assert alice.post(key="k").status_code == 500
    assert alice.request("PUT", key="k").status_code == 500
    assert effects() == 0


@pytest.mark.failure_mode(66)
def test_what_has_no_name_of_its_own_has_that_of_its_type() -> None:
    class Calling:
        def __call__(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    idempotent("tests.instance")(Calling())
    idempotent("tests.instance")(Calling())
    with refused("Calling"):
        idempotent("tests.instance")(plain_answer)


@pytest.mark.failure_mode(66)
def test_one_operation_may_be_passed_to_several(alice: Caller, serve: Serve) -> None:
    shared = Operation("tests.passed")
    serve(idempotent(shared)(plain_answer), **{"other/": idempotent(shared)(other)})
    assert alice.post(key="k").status_code == 201
    # The same key in two places is one key of one operation: refused, and never answered with the other's outcome.
    assert problem_code(alice.post("/other/", key="k")) == "idempotency_key_reused"
    assert effects() == 1


# One view in two places


@pytest.mark.failure_mode(66)
@pytest.mark.parametrize(
    ("first", "second", "one"),
    [
        pytest.param(("orders/", None), ("invoices/", None), False, id="no names"),
        pytest.param(("orders/", "orders"), ("invoices/", "invoices"), False, id="two names"),
        pytest.param(("orders/", "orders"), ("invoices/", None), False, id="one name"),
        pytest.param(("orders/", "orders"), ("api/orders/", "orders"), True, id="a prefix"),
        pytest.param(("orders", "orders"), ("orders/", "orders"), True, id="a slash"),
        pytest.param(("orders", None), ("orders/", None), True, id="a slash and no name"),
    ],
)
def test_two_patterns_of_one_view_are_one_place_if_they_have_one_name(
    alice: Caller, settings: Any, first: tuple[str, Any], second: tuple[str, Any], one: bool
) -> None:
    view = api_view(["POST"])(idempotent("tests.place")(drf_answer))
    settings.ROOT_URLCONF = tuple(path(route, view, name=name) for route, name in (first, second))
    answer = alice.post(f"/{first[0]}", key="k")
    again = alice.post(f"/{second[0]}", key="k")
    if one:
        assert again.content == answer.content
    else:
        assert problem_code(again) == "idempotency_key_reused"
    assert effects() == 1


@pytest.mark.failure_mode(66)
def test_two_viewsets_that_inherit_one_handler_are_two_places(alice: Caller, settings: Any) -> None:
    class Creating(viewsets.GenericViewSet[Any]):
        queryset = Transfer.objects.none()

        @idempotent("tests.create")
        def create(self, request: Request) -> Response:
            return drf_answer(request)

        @action(detail=False, methods=["post"], url_path="create-too")
        @idempotent("tests.other")
        def create_too(self, request: Request) -> Response:
            return drf_answer(request)

    class Orders(Creating):
        pass

    class Invoices(Creating):
        pass

    router = SimpleRouter()
    router.register("orders", Orders, basename="order")
    router.register("invoices", Invoices, basename="invoice")
    settings.ROOT_URLCONF = tuple(router.urls)
    for place in ("", "create-too/"):
        assert alice.post(f"/orders/{place}", key="k").status_code == 201
        assert problem_code(alice.post(f"/invoices/{place}", key="k")) == "idempotency_key_reused"
    assert effects() == 2
