"""What is declared as protected is protected, or refused when it is declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import PermissionRequiredMixin
from django.core.exceptions import ImproperlyConfigured
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
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.views import UndecoratedView, WorkingModelViewSet, drf_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(62)]

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@contextmanager
def refused(match: str) -> Iterator[None]:
    """The block is refused as a wrong declaration. Before Python 3.12 ``__set_name__`` has its errors wrapped."""
    with pytest.raises((ImproperlyConfigured, RuntimeError)) as raised:
        yield
    error = raised.value if isinstance(raised.value, ImproperlyConfigured) else raised.value.__cause__
    assert isinstance(error, ImproperlyConfigured)
    assert match in str(error)


def runs_once(alice: Caller, method: str, url: str = "/") -> bool:
    """Whether a request and its retry take effect once, and a request without a key doesn't."""
    before = effects()
    answers = [alice.request(method, url, key="k") for _ in range(2)]
    assert {answer.status_code for answer in answers} == {201}
    alice.request(method, url)
    return effects() == before + 1 and answers[1].content == answers[0].content


# An explicitly protected handler is protected whatever its method


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


# Where the mixin stands, and what else overrides what


class Writing:
    def post(self, request: Any) -> Response:
        return drf_answer(request)

    put = post


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


# What would run before the caller is asked for


class Asking(PermissionRequiredMixin, UndecoratedView):
    permission_required = "testproject.add_transfer"


@pytest.mark.parametrize("base", [UndecoratedView, Asking, APIView])
def test_the_decorator_on_dispatch_is_refused(base: Any) -> None:
    with refused("Dispatching.dispatch, where it would run before authentication and permissions"):

        class Dispatching(base):
            @idempotent("tests.dispatch")
            def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
                return super().dispatch(request, *args, **kwargs)


@pytest.mark.parametrize("base", [UndecoratedView, Asking, Writing])
def test_a_method_decorator_on_dispatch_never_runs(alice: Caller, serve: Serve, base: Any) -> None:
    bases = (base, APIView) if base is Writing else (base,)
    decorate: Callable[..., Any] = method_decorator(idempotent("tests.dispatch"), name="dispatch")
    serve(decorate(type("Dispatching", bases, {})).as_view())
    assert alice.post(key="k").status_code == 500
    assert effects() == 0


def test_the_decorator_above_what_asks_for_the_caller_is_refused() -> None:
    with refused("its dispatch(), which may ask for a login or a permission"):
        idempotent("tests.asking")(Asking.as_view())
    with refused("its dispatch(), which may ask for a login or a permission"):
        decorated: Any = method_decorator(login_required, name="dispatch")(type("Login", (UndecoratedView,), {}))
        idempotent("tests.asking")(decorated.as_view())


@pytest.mark.skipif(not hasattr(login_required(plain_answer), "redirect_field_name"), reason="Django below 5.1")
def test_the_decorator_above_login_required_is_refused() -> None:
    with refused("stands above login_required"):
        idempotent("tests.asking")(login_required(plain_answer))


# One name, one function


def other(request: HttpRequest) -> HttpResponse:
    return plain_answer(request)


@pytest.mark.failure_mode(66)
def test_a_second_function_under_a_bare_name_is_refused() -> None:
    idempotent("tests.shared")(plain_answer)
    idempotent("tests.shared")(plain_answer)  # a module that is loaded again declares the same again
    with refused("'tests.shared' is declared for tests.http.test_declarations.other, and for tests.http.views.plain"):
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


@pytest.mark.parametrize("name", ["setup", "initial", "check_permissions"])
@pytest.mark.parametrize("way", ["decorator", "mixin"])
def test_a_hook_whose_answer_is_thrown_away_is_refused(name: str, way: str) -> None:
    def hook(self: Any, request: Any) -> None:
        """Stand where the framework expects a hook."""

    operation = Operation("tests.hook")
    declared: dict[str, dict[str, Any]] = {
        "decorator": {name: idempotent(operation)(hook)},
        "mixin": {name: hook, "idempotent_operations": {name: operation}},
    }
    with refused("its answer is thrown away"):
        type("Shop", (IdempotentMixin, APIView), declared[way])


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
