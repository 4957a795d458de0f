"""Which methods of a protected view are protected, and which pass through."""

from __future__ import annotations

from typing import Any, ClassVar

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
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.declaring import METHODS, refused, runs_once
from tests.http.views import UndecoratedView, WorkingModelViewSet, drf_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(62)]


class EveryMethod:
    def get(self, request: Any) -> Any:
        return plain_answer(request)

    post = put = patch = delete = get


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["decorator", "method_decorator", "under another decorator", "mixin"])
def test_a_handler_is_protected_whatever_its_method(alice: Caller, serve: Serve, method: str, way: str) -> None:
    def handler(self: Any, request: HttpRequest) -> HttpResponse:
        return plain_answer(request)

    name = handler.__name__ = method.lower()
    handler.__qualname__ = f"Decorated.{name}"
    view: Any
    if way == "mixin":
        view = type("Mixed", (IdempotentMixin, EveryMethod, APIView), {"idempotent_operations": {name: "tests.any"}})
    else:
        decorate = idempotent("tests.any")
        decorated = {
            "decorator": decorate,
            "method_decorator": method_decorator(decorate),
            "under another decorator": lambda function: method_decorator(never_cache)(decorate(function)),
        }[way](handler)
        view = type("Decorated", (EveryMethod, View), {name: decorated})
    serve(view.as_view())
    for served in METHODS:
        assert runs_once(alice, served) == (served == method)
    assert IdempotencyRecord.objects.count() == 1


@pytest.mark.parametrize(
    ("method", "name"), [("PUT", "update"), ("PATCH", "partial_update"), ("DELETE", "destroy"), ("GET", "list")]
)
@pytest.mark.parametrize("way", ["decorator", "mixin"])
def test_an_action_is_protected_whatever_its_method(
    alice: Caller, settings: Any, method: str, name: str, way: str
) -> None:
    def handler(self: Any, request: Request, **kwargs: Any) -> Response:
        return drf_answer(request)

    handler.__name__ = name
    handler.__qualname__ = f"Routed.{name}"
    body: dict[str, Any] = {"idempotent_operations": {name: "tests.any"}, name: handler}
    if way == "decorator":
        body = {name: idempotent("tests.any")(handler)}
    bases = (viewsets.ModelViewSet,) if way == "decorator" else (IdempotentMixin, viewsets.ModelViewSet)
    router = SimpleRouter()
    router.register("transfers", type("Routed", bases, body), basename="transfer")
    settings.ROOT_URLCONF = tuple(router.urls)
    url = "/transfers/" if name == "list" else "/transfers/1/"
    answers = [alice.request(method, url, key="k") for _ in range(2)]
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert effects() == 1
    assert problem_code(alice.request(method, url)) == "idempotency_key_missing"


@pytest.mark.parametrize("way", ["decorator", "mixin"])
def test_of_a_handler_of_several_methods_the_safe_ones_pass_through(alice: Caller, serve: Serve, way: str) -> None:
    def change(self: Any, request: Request) -> Response:
        return drf_answer(request)

    change.__qualname__ = "ViewSet.change"
    if way == "decorator":
        view: Any = type("ViewSet", (viewsets.ViewSet,), {"change": idempotent("tests.change")(change)})
    else:
        body = {"idempotent_operations": {"change": "tests.change"}, "change": change}
        view = type("ViewSet", (IdempotentMixin, viewsets.ViewSet), body)
    serve(view.as_view({"get": "change", "put": "change"}), **{"patch/": view.as_view({"patch": "change"})})
    assert runs_once(alice, "PUT")
    assert not runs_once(alice, "GET")
    assert alice.request("HEAD").status_code == 201
    IdempotencyRecord.objects.all().delete()
    assert runs_once(alice, "PATCH", "/patch/")


def test_head_of_a_protected_get_is_protected_too(alice: Caller, serve: Serve) -> None:
    class Getting(View):
        @idempotent("tests.get")
        def get(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    serve(Getting.as_view())
    assert alice.request("HEAD").status_code == 400
    assert effects() == 0


def test_a_protected_handler_that_another_one_calls_is_protected(alice: Caller, serve: Serve) -> None:
    class Delegating(View):
        @idempotent("tests.delegated")
        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        def get(self, request: HttpRequest) -> Any:
            return self.post(request)

        put = get

        @idempotent("tests.helper")
        def pay(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        def delete(self, request: HttpRequest) -> Any:
            return self.pay(request)

        patch = delete

        def options(self, request: HttpRequest) -> Any:  # type: ignore[override]
            return self.pay(request)

    serve(Delegating.as_view())
    assert runs_once(alice, "PUT")
    IdempotencyRecord.objects.all().delete()
    assert runs_once(alice, "GET")
    assert runs_once(alice, "DELETE")
    assert not runs_once(alice, "OPTIONS")  # what serves no method in particular lets safe ones pass


def test_of_a_function_methods_decide(alice: Caller, serve: Serve) -> None:
    plain = idempotent("tests.plain")(plain_answer)
    drf = api_view(METHODS)(idempotent("tests.drf")(drf_answer))
    as_view = idempotent("tests.class")(type("Every", (EveryMethod, View), {}).as_view())
    serve(plain, **{"drf/": drf, "class/": as_view})
    for url in ("/", "/drf/", "/class/"):
        for method in METHODS:
            assert runs_once(alice, method, url) == (method in {"POST", "PATCH"})
            IdempotencyRecord.objects.all().delete()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_function_that_serves_none_of_the_methods_is_protected(alice: Caller, serve: Serve, method: str) -> None:
    class Only(View):
        def served(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    setattr(Only, method.lower(), Only.served)
    drf = api_view([method])(idempotent("tests.drf")(drf_answer))
    serve(drf, **{"class/": idempotent("tests.class")(Only.as_view())})
    assert runs_once(alice, method)
    assert runs_once(alice, method, "/class/")


def test_a_method_of_what_is_not_a_view_is_a_function(alice: Caller, serve: Serve) -> None:
    class Service:
        @idempotent("tests.service")
        def run(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    serve(Service().run)
    assert runs_once(alice, "POST")
    assert not runs_once(alice, "PUT")


def test_an_operations_own_methods_come_first(alice: Caller, serve: Serve) -> None:
    def change(self: Any, request: Request) -> Response:
        return drf_answer(request)

    operation = Operation("tests.change", methods=("PATCH",))
    body = {"idempotent_operations": {"change": operation}, "change": change}
    view: Any = type("ViewSet", (IdempotentMixin, viewsets.ViewSet), body)
    serve(view.as_view({"put": "change", "patch": "change"}))
    assert runs_once(alice, "PATCH")
    assert not runs_once(alice, "PUT")


POST_ONLY = {"methods": ("POST",)}


def test_a_handler_that_its_operation_leaves_out_is_refused() -> None:
    with refused("protects nothing: Decorated.put serves PUT, and its methods are POST"):

        class Decorated(View):
            @idempotent("tests.put", methods=("POST",))
            def put(self, request: HttpRequest) -> HttpResponse:
                return plain_answer(request)

    with refused("protects nothing: Mixed.delete serves DELETE"):

        class Mixed(IdempotentMixin, APIView):
            idempotent_operations: ClassVar = {"delete": Operation("tests.delete", methods=("POST",))}

            def delete(self, request: Request) -> Response:
                return drf_answer(request)

    with refused("protects nothing: UndecoratedView.as_view() serves GET, POST"):
        idempotent("tests.class", methods=("PUT",))(UndecoratedView.as_view())
    with refused("protects nothing: @api_view function drf_answer serves PUT"):
        api_view(["PUT"])(idempotent("tests.drf", methods=("POST",))(drf_answer))


@pytest.mark.parametrize("way", ["decorator", "mixin"])
def test_an_action_that_its_operation_leaves_out_is_refused_when_it_is_routed(way: str) -> None:
    operation = Operation("tests.update", methods=("POST",))
    if way == "decorator":
        body: dict[str, Any] = {"update": idempotent(operation)(WorkingModelViewSet.update)}
        view: Any = type("ViewSet", (WorkingModelViewSet,), body)
    else:
        body = {"idempotent_operations": {"update": operation}}
        view = type("ViewSet", (IdempotentMixin, WorkingModelViewSet), body)
    view.as_view({"get": "list", "post": "update"})
    with refused("protects nothing: ViewSet.update, as routed, serves PUT"):
        view.as_view({"get": "list", "put": "update"})
