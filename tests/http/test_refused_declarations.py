"""What could not be protected as it is declared is refused when it is declared."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import PermissionRequiredMixin
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework import viewsets
from rest_framework.decorators import api_view
from rest_framework.views import APIView

from idempotency import Operation, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from tests.http.callers import Caller
from tests.http.declaring import WAYS, Creating, Declaring, protecting, refused
from tests.http.serving import Serve
from tests.http.views import Methods, ModelActions, PlainView, drf_answer, plain_answer

# Whether a method is protected is decided before the database is asked.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.once]


def test_a_function_whose_methods_its_operation_leaves_out_is_refused() -> None:
    with refused("protects nothing: PlainView.as_view() serves GET, POST"):
        idempotent("tests.class", methods=("PUT",))(PlainView.as_view())
    with refused("protects nothing: drf_answer() serves PUT"):
        api_view(["PUT"])(idempotent("tests.drf", methods=("POST",))(drf_answer))


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
def test_the_decorator_on_dispatch_is_refused(base: Any) -> None:
    with refused(f"{base.__name__}.dispatch, where it would run before authentication and permissions"):
        protecting("decorator", base, {"dispatch": "tests.dispatch"})


def test_the_decorator_within_method_decorator_is_refused() -> None:
    """It would hide from the class what is protected, and where."""

    def post(self: Any, request: Any) -> Any: ...

    decorate = idempotent("tests.hidden")
    with refused("Put it on the method itself, without method_decorator()."):
        method_decorator(decorate)(post)
    for name in ("post", "dispatch"):
        with refused("post = idempotent('tests.hidden')(Base.post)"):
            method_decorator([never_cache, decorate], name=name)(type("Hidden", (PlainView,), {}))


def test_the_decorator_without_a_name_says_how_to_write_it() -> None:
    with refused('write @idempotent("orders.create"), with a name of your own, above plain_answer'):
        idempotent(plain_answer)  # type: ignore[arg-type]
    with refused('write @idempotent("orders.create"), with a name of your own.'):
        idempotent()


def test_the_decorator_above_what_asks_for_the_caller_is_refused() -> None:
    decorated: Any = method_decorator(login_required, name="dispatch")(type("Login", (PlainView,), {}))
    for view in (Asking.as_view(), decorated.as_view(), login_required(decorated.as_view()), api_view()(drf_answer)):
        with refused("where it would run before dispatch(), which may check a login or a permission"):
            idempotent("tests.asking")(view)
    with refused("is above login_required"):
        idempotent("tests.asking")(login_required(plain_answer))
    below = type("Below", (APIView,), {"post": method_decorator(login_required)(Methods.post)})
    with refused("is above login_required"):
        protecting("mixin", below, {"post": "tests.below"})


@pytest.mark.parametrize(
    ("base", "name"), [(View, "setup"), (APIView, "setup"), (APIView, "initial"), (APIView, "check_permissions")]
)
def test_a_hook_whose_answer_is_thrown_away_is_refused_and_stops_the_request_if_it_is_hidden(
    alice: Caller, serve: Serve, base: Any, name: str
) -> None:
    def hook(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        getattr(super(view, self), name)(request, *args, **kwargs)

    def post(self: Any, request: Any) -> Any:
        ran.append(request)

    ran: list[Any] = []
    hook.__name__, hook.__qualname__ = name, f"Shop.{name}"
    for way in WAYS:
        with refused("its answer is ignored"):
            protecting(way, type("Shop", (base,), {name: hook}), {name: Operation("tests.refused")})
    decorated: Any = method_decorator(never_cache)(idempotent("tests.hook")(hook))
    view: Any = type("Shop", (base,), {name: decorated, "post": post})
    serve(view.as_view())
    assert alice.post(key="k").status_code == 500
    assert ran == []
    guarded = type("Guarded", (view,), {"put": idempotent("tests.put")(post)})
    with refused("which is no handler: its answer is ignored"):
        guarded.as_view()


def test_a_handler_that_is_replaced_after_its_class_was_made_is_refused() -> None:
    mixed: Any = type("Mixed", (Declaring, Methods, APIView), {})
    mixed.as_view()
    mixed.post = Methods.post
    with refused("Mixed.post was replaced after the class was made, so 'tests.declaring' does not protect it"):
        mixed.as_view()
