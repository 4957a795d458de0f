"""Which methods of a protected view are protected, and which pass through."""

from __future__ import annotations

from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework import viewsets
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import Operation, idempotent
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, assert_refused, effects, replayed
from tests.http.declaring import METHODS, WAYS, EveryMethod, protecting, runs_once
from tests.http.serving import Serve
from tests.http.views import PlainView, drf_answer, plain_answer

# Whether a method is protected is decided before the database is asked.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.once]


class Changing(viewsets.ViewSet):
    """One action, which a route gives several methods."""

    def change(self, request: Request) -> Response:
        return drf_answer(request)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["decorator", "under another decorator", "mixin"])
def test_a_handler_is_protected_whatever_its_method(alice: Caller, serve: Serve, method: str, way: str) -> None:
    def handler(self: Any, request: HttpRequest) -> HttpResponse:
        return plain_answer(request)

    name = handler.__name__ = method.lower()
    handler.__qualname__ = f"Decorated.{name}"
    view: Any
    if way == "mixin":
        view = protecting("mixin", type("Every", (EveryMethod, APIView), {}), {name: "tests.any"})
    else:
        decorated: Any = idempotent("tests.any")(handler)
        if way == "under another decorator":
            decorated = method_decorator(never_cache)(decorated)
        view = type("Decorated", (EveryMethod, View), {name: decorated})
    serve(view.as_view())
    assert [served for served in METHODS if runs_once(alice, served)] == [method]
    assert IdempotencyRecord.objects.count() == 1


@pytest.mark.parametrize(
    ("method", "name"), [("PUT", "update"), ("PATCH", "partial_update"), ("DELETE", "destroy"), ("GET", "list")]
)
@pytest.mark.parametrize("way", WAYS)
def test_an_action_is_protected_by_any_method(alice: Caller, settings: Any, method: str, name: str, way: str) -> None:
    def handler(self: Any, request: Request, **kwargs: Any) -> Response:
        return drf_answer(request)

    handler.__name__ = name
    handler.__qualname__ = f"Routed.{name}"
    router = SimpleRouter()
    view = protecting(way, type("Routed", (viewsets.ModelViewSet,), {name: handler}), {name: "tests.any"})
    router.register("transfers", view, basename="transfer")
    settings.ROOT_URLCONF = tuple(router.urls)
    url = "/transfers/" if name == "list" else "/transfers/1/"
    replayed(alice, url, method=method)
    assert_refused(alice, "idempotency_key_missing", url, method=method)


@pytest.mark.parametrize("way", WAYS)
def test_of_a_handler_of_several_methods_the_safe_ones_pass_through(alice: Caller, serve: Serve, way: str) -> None:
    view = protecting(way, Changing, {"change": "tests.change"})
    serve(view.as_view({"get": "change", "put": "change"}), **{"patch/": view.as_view({"patch": "change"})})
    assert runs_once(alice, "PUT")
    assert not runs_once(alice, "GET")
    assert alice.request("HEAD").status_code == 201
    assert runs_once(alice, "PATCH", "/patch/")


def test_head_of_a_protected_get_is_protected_too(alice: Caller, serve: Serve, atomic: bool) -> None:
    serve(protecting("decorator", PlainView, {"get": "tests.get"}).as_view())
    assert alice.request("HEAD").status_code == 400


def test_a_protected_handler_that_another_one_calls_is_protected(alice: Caller, serve: Serve) -> None:
    class Delegating(View):
        @idempotent("tests.delegated")
        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        @idempotent("tests.helper")
        def pay(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        def get(self, request: HttpRequest) -> Any:
            return self.post(request)

        def delete(self, request: HttpRequest) -> Any:
            return self.pay(request)

        put, options = get, delete

    serve(Delegating.as_view())
    # What serves no method in particular lets safe ones pass.
    called = [method for method in ("PUT", "GET", "DELETE", "OPTIONS") if runs_once(alice, method)]
    assert called == ["PUT", "GET", "DELETE"]


@pytest.mark.scenario_11
@pytest.mark.parametrize(
    "view",
    [
        lambda: idempotent("tests.any")(plain_answer),
        lambda: api_view([*METHODS, "HEAD", "OPTIONS"])(idempotent("tests.any")(drf_answer)),
        lambda: idempotent("tests.any")(type("Every", (EveryMethod, View), {}).as_view()),
    ],
    ids=["function", "drf", "class"],
)
@pytest.mark.parametrize("key", [None, "k", "a,b"], ids=["no key", "key", "bad key"])
def test_a_function_is_protected_by_post_and_patch_only(alice: Caller, serve: Serve, view: Any, key: Any) -> None:
    serve(view())
    assert runs_once(alice, "POST")
    assert runs_once(alice, "PATCH")
    for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS") * 2:
        before = effects()
        answer = alice.request(method, key=key)
        # OPTIONS of a class is answered by the framework.
        assert (answer.status_code, effects() - before) in {(201, 1), (200, 0) if method == "OPTIONS" else (201, 1)}
        assert not {"Idempotency-Key", "Idempotency-Replayed"} & {*answer.headers}
    assert IdempotencyRecord.objects.count() == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_function_that_serves_none_of_the_methods_is_protected(alice: Caller, serve: Serve, method: str) -> None:
    only: Any = type("Only", (View,), {method.lower(): EveryMethod.get})
    drf = api_view([method])(idempotent("tests.drf")(drf_answer))
    serve(drf, **{"class/": idempotent("tests.class")(only.as_view())})
    assert runs_once(alice, method)
    assert runs_once(alice, method, "/class/")


def test_a_method_of_what_is_not_a_view_is_a_function(alice: Caller, serve: Serve) -> None:
    class Service:
        @idempotent("tests.service")
        def run(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    serve(Service().run)
    assert [runs_once(alice, method) for method in ("POST", "PUT")] == [True, False]


def test_an_operations_own_methods_come_first(alice: Caller, serve: Serve) -> None:
    view = protecting("mixin", Changing, {"change": Operation("tests.change", methods=("PATCH",))})
    function = idempotent("tests.put", methods=["PUT"])(plain_answer)
    serve(view.as_view({"put": "change", "patch": "change"}), **{"function/": function})
    assert [runs_once(alice, method) for method in ("PATCH", "PUT")] == [True, False]
    assert [runs_once(alice, method, "/function/") for method in ("PUT", "POST")] == [True, False]
