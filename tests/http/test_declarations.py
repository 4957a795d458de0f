"""What is declared as protected is protected, or refused when it is declared."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import PermissionRequiredMixin
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework import viewsets
from rest_framework.views import APIView

from idempotency import Operation, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, effects
from tests.http.declaring import WAYS, protecting, refused, runs_once
from tests.http.serving import Serve
from tests.http.views import Methods, PlainView, drf_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(62), pytest.mark.once]


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

    def put(self, request: Any) -> Any:
        return drf_answer(request)


BASES = {
    "first": (Declaring, Methods, APIView),
    "last": (Methods, APIView, Declaring),
    "behind an initial() of the project": (SkipsInitial, Declaring, Methods, APIView),
    "behind a dispatch() of the project": (SkipsDispatch, Declaring, Methods, APIView),
    "decorated": (Creating, APIView),
}


@pytest.mark.parametrize("bases", BASES.values(), ids=BASES)
def test_a_mixin_protects_wherever_it_stands(
    alice: Caller, serve: Serve, bases: tuple[type, ...], atomic: bool
) -> None:
    view: Any = type("Mixed", bases, {})
    serve(view.as_view())
    assert runs_once(alice, "POST")
    # What isn't protected has its transaction still.
    assert alice.request("PUT", "/?crash=1").status_code == 500
    assert effects() == (1 if atomic else 2)


def test_the_mixin_protects_a_plain_view(alice: Caller, serve: Serve) -> None:
    serve(protecting("mixin", PlainView, {"post": "tests.plain"}).as_view())
    assert runs_once(alice, "POST")
    assert not runs_once(alice, "GET")


def test_a_handler_that_is_replaced_later_is_protected(alice: Caller, serve: Serve, monkeypatch: Any) -> None:
    class Mixed(Declaring, Methods, APIView):
        pass

    serve(Mixed.as_view())
    assert runs_once(alice, "POST")
    monkeypatch.setattr(Mixed, "post", lambda self, request: drf_answer(request))
    IdempotencyRecord.objects.all().delete()
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


# Where a declaration would run before the caller is asked for, or be thrown away


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
