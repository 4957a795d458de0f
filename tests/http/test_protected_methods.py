"""What is declared as protected is protected, or refused when it is declared; and which methods pass through."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import PermissionRequiredMixin
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
from tests.http.callers import Caller, assert_refused, effects, replayed
from tests.http.declaring import METHODS, WAYS, protecting, refused, runs_once
from tests.http.serving import Serve
from tests.http.views import Methods, ModelActions, PlainView, drf_answer, plain_answer

# Whether a method is protected is decided before the database is asked.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(62), pytest.mark.once]


class EveryMethod:
    def get(self, request: Any) -> Any:
        return plain_answer(request)

    post = put = patch = delete = get


class Changing(viewsets.ViewSet):
    """One action, which a route gives several methods."""

    def change(self, request: Request) -> Response:
        return drf_answer(request)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["decorator", "method_decorator", "under another decorator", "mixin"])
def test_a_handler_is_protected_whatever_its_method(alice: Caller, serve: Serve, method: str, way: str) -> None:
    def handler(self: Any, request: HttpRequest) -> HttpResponse:
        return plain_answer(request)

    name = handler.__name__ = method.lower()
    handler.__qualname__ = f"Decorated.{name}"
    view: Any
    if way == "mixin":
        view = protecting("mixin", type("Every", (EveryMethod, APIView), {}), {name: "tests.any"})
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

        def get(self, request: HttpRequest) -> Any:
            return self.post(request)

        put = get

        @idempotent("tests.helper")
        def pay(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        def delete(self, request: HttpRequest) -> Any:
            return self.pay(request)

        options = delete

    serve(Delegating.as_view())
    assert runs_once(alice, "PUT")
    assert runs_once(alice, "GET")
    assert runs_once(alice, "DELETE")
    assert not runs_once(alice, "OPTIONS")  # what serves no method in particular lets safe ones pass


@pytest.mark.scenario(11)
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
    for method in (*METHODS, "HEAD", "OPTIONS"):
        if method in {"POST", "PATCH"}:
            assert runs_once(alice, method)
            continue
        for _ in range(2):
            before = effects()
            answer = alice.request(method, key=key)
            # OPTIONS of a class is answered by the framework.
            assert (answer.status_code, effects() - before) in {(201, 1), (200, 0) if method == "OPTIONS" else (201, 1)}
            assert "Idempotency-Key" not in answer
            assert "Idempotency-Replayed" not in answer
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
    assert runs_once(alice, "POST")
    assert not runs_once(alice, "PUT")


def test_an_operations_own_methods_come_first(alice: Caller, serve: Serve) -> None:
    view = protecting("mixin", Changing, {"change": Operation("tests.change", methods=("PATCH",))})
    serve(
        view.as_view({"put": "change", "patch": "change"}),
        **{"function/": idempotent("tests.put", methods=["PUT"])(plain_answer)},
    )
    assert runs_once(alice, "PATCH")
    assert not runs_once(alice, "PUT")
    assert runs_once(alice, "PUT", "/function/")
    assert not runs_once(alice, "POST", "/function/")


@pytest.mark.parametrize("way", WAYS)
def test_a_handler_that_its_operation_leaves_out_is_refused(way: str) -> None:
    post_only = Operation("tests.post", methods=("POST",))
    with refused("protects nothing: Put.put serves PUT, and its methods are POST"):
        protecting(way, type("Put", (Methods, APIView), {}), {"put": post_only})
    # Of an action, only the route tells the methods.
    view = protecting(way, ModelActions, {"update": post_only})
    view.as_view({"get": "list", "post": "update"})
    with refused("protects nothing: ModelActions.update, as routed, serves PUT"):
        view.as_view({"get": "list", "put": "update"})


def test_a_function_whose_methods_its_operation_leaves_out_is_refused() -> None:
    with refused("protects nothing: PlainView.as_view() serves GET, POST"):
        idempotent("tests.class", methods=("PUT",))(PlainView.as_view())
    with refused("protects nothing: @api_view function drf_answer serves PUT"):
        api_view(["PUT"])(idempotent("tests.drf", methods=("POST",))(drf_answer))


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


class Declaring(IdempotentMixin):
    """A mixin of the project's own, which passes the protection on."""

    idempotent_operations: ClassVar = {"post": "tests.declaring"}


class Creating:
    """A mixin of the project's own with a decorated method."""

    @idempotent("declarations.creating")
    def post(self, request: Any) -> Any:
        return drf_answer(request)

    put = Methods.put


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


def test_a_handler_that_is_replaced_later_is_protected(alice: Caller, serve: Serve, monkeypatch: Any) -> None:
    class Mixed(Declaring, Methods, APIView):
        pass

    serve(Mixed.as_view())
    assert runs_once(alice, "POST")
    monkeypatch.setattr(Mixed, "post", lambda self, request: drf_answer(request))
    assert runs_once(alice, "POST")


def test_the_mixin_calls_the_new_of_subclasses_and_bases(alice: Caller, serve: Serve) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    class Base(Methods):
        def __new__(cls, **initkwargs: Any) -> Any:
            made.append(("base", initkwargs))
            return super().__new__(cls)

    class Mixed(Declaring, Base, APIView):
        def __new__(cls, **initkwargs: Any) -> Any:
            made.append(("subclass", initkwargs))
            return super().__new__(cls, **initkwargs)

    serve(Mixed.as_view(http_method_names=["post"]))
    assert runs_once(alice, "POST")
    given = {"http_method_names": ["post"]}
    assert made == [("subclass", given), ("base", given)] * 3


def test_wrong_mappings_are_refused() -> None:
    with refused("must map the names of handlers to operations"):
        type("Listed", (IdempotentMixin, APIView), {"idempotent_operations": ["post"]})
    with refused("names 'creat', but Misspelt has no such handler"):
        type("Misspelt", (IdempotentMixin, viewsets.ViewSet), {"idempotent_operations": {"creat": "tests.misspelt"}})
    with refused("before authentication"):
        protecting("mixin", APIView, {"dispatch": "tests.dispatch"})
    with refused("'tests.mixin', but @idempotent on the method gives it to 'declarations.creating'"):
        protecting("mixin", type("Twice", (Creating, APIView), {}), {"post": "tests.mixin"})
    mixed = type("Mixed", (IdempotentMixin, Methods, APIView), {})
    with refused("is an attribute of the class Mixed, not an argument of as_view()"):
        mixed.as_view(idempotent_operations={"post": "tests.late"})  # type: ignore[attr-defined]


class Asking(PermissionRequiredMixin, PlainView):
    permission_required = "testproject.add_transfer"


@pytest.mark.parametrize("base", [PlainView, Asking, type("Drf", (Methods, APIView), {})])
def test_the_decorator_on_dispatch_is_refused_or_never_runs(alice: Caller, serve: Serve, base: Any) -> None:
    with refused(f"{base.__name__}.dispatch, where it would run before authentication and permissions"):
        protecting("decorator", base, {"dispatch": "tests.dispatch"})
    decorate: Any = method_decorator(idempotent("tests.dispatch"), name="dispatch")
    serve(decorate(type("Dispatching", (base,), {})).as_view())
    assert alice.post(key="k").status_code == 500
    assert effects() == 0


def test_the_decorator_without_a_name_says_how_to_write_it() -> None:
    with refused('write @idempotent("orders.create"), with a name of your own, above plain_answer'):
        idempotent(plain_answer)  # type: ignore[arg-type]


def test_the_decorator_above_what_asks_for_the_caller_is_refused() -> None:
    decorated: Any = method_decorator(login_required, name="dispatch")(type("Login", (PlainView,), {}))
    for view in (Asking, decorated):
        with refused("its dispatch(), which may check a login or a permission"):
            idempotent("tests.asking")(view.as_view())
    with refused("is above login_required"):
        idempotent("tests.asking")(login_required(plain_answer))


@pytest.mark.parametrize("name", ["setup", "initial", "check_permissions"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_whose_answer_is_thrown_away_is_refused(name: str, way: str) -> None:
    def hook(self: Any, request: Any) -> None:
        """Stand where the framework expects a hook."""

    with refused("its answer is ignored"):
        protecting(way, type("Shop", (APIView,), {name: hook}), {name: Operation("tests.hook")})


@pytest.mark.parametrize("base", [View, APIView])
def test_a_hook_that_a_method_decorator_hides_stops_the_request(alice: Caller, serve: Serve, base: Any) -> None:
    class Shop(base):  # type: ignore[misc]
        @method_decorator(idempotent("tests.hook"))
        def setup(self, request: Any, *args: Any, **kwargs: Any) -> None:
            super().setup(request, *args, **kwargs)

        def post(self, request: Any) -> Any:
            ran.append(request)

    ran: list[Any] = []
    serve(Shop.as_view())
    assert alice.post(key="k").status_code == 500
    assert ran == []
