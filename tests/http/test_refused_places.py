"""Where a declaration would run before the caller is asked for, or be thrown away: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import PermissionRequiredMixin
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.views import APIView

from idempotency import Operation, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from tests.http.callers import Caller, Serve, effects
from tests.http.declaring import Writing, refused
from tests.http.views import UndecoratedView, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_mode(62)]


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
