"""An operation's name belongs to one function. One view in two places is two operations."""

from functools import partial

import pytest
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework import viewsets
from rest_framework.decorators import action, api_view
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import Operation, idempotent
from tests.http.callers import assert_refused, effects, replayed
from tests.http.serving import EveryMethod, protecting, refused
from tests.http.views import AsyncView, ModelActions, PlainView, drf_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.failure_66, pytest.mark.once]


def other(request):
    return plain_answer(request)


class Calling:
    def __call__(self, request):
        return plain_answer(request)


def by_mixin(base, *names):
    return protecting("mixin", base, dict.fromkeys(names, "tests.shared"))


def by_decorator(view):
    return idempotent("tests.shared")(view)


def named(name):
    view = partial(plain_answer)
    view.__qualname__ = name
    return by_decorator(view)


FIRST = partial(by_decorator, plain_answer)
SECOND = partial(by_decorator, other)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, SECOND),
        (FIRST, lambda: by_decorator(lambda request: plain_answer(request))),
        (FIRST, lambda: api_view()(by_decorator(drf_answer))),
        (FIRST, lambda: protecting("decorator", PlainView, {"post": "tests.shared"})),
        (lambda: by_decorator(partial(partial(plain_answer))), lambda: by_decorator(partial(drf_answer))),
        (partial(named, "one"), partial(named, "two")),
        (lambda: by_decorator(Calling()), lambda: by_decorator(type("Another", (Calling,), {})())),
        (lambda: by_decorator(PlainView.as_view()), lambda: by_decorator(AsyncView.as_view())),
        (FIRST, lambda: by_mixin(APIView, "options")),
        (lambda: by_mixin(ModelActions, "create"), lambda: by_mixin(type("Two", (ModelActions,), {}), "create")),
        (lambda: None, lambda: by_mixin(ModelActions, "create", "pay")),
    ],
    ids=["function", "local", "api_view", "method", "partial", "named", "instance", "class", "mixin", "mixins", "both"],
)
def test_a_second_function_under_a_bare_name_is_refused(first, second):
    first()
    first()  # a reloaded module repeats its declaration
    names_both = f"'tests.shared' is declared for {__name__}.other, and already for tests.http.views.plain_answer"
    with refused("'tests.shared' is declared for" if second is not SECOND else names_both):
        second()


def test_a_subclass_belongs_to_the_operation_of_its_parent():
    class Parent(ModelActions):
        pay = idempotent("tests.pay")(ModelActions.pay)

    class Overrides(protecting("mixin", Parent, {"create": "tests.create"})):
        idempotent_operations = {"create": "tests.create"}

        @idempotent("tests.pay")
        def pay(self, request):
            return super().pay(request)

    for view in (type("Inherits", (Overrides,), {}), Overrides):
        assert view.as_view({"post": "create"})


def test_a_hidden_method_is_refused_at_its_first_call(alice, serve):
    def hiding(handler):
        hidden = method_decorator(never_cache)(idempotent("tests.hidden")(handler))
        return type("Hidden", (View,), {"post": hidden}).as_view()

    serve(hiding(PlainView.post), **{"two/": hiding(EveryMethod.get)})
    assert [alice.post(url, key="k").status_code for url in ("/", "/two/", "/")] == [201, 500, 201]
    assert effects() == 1


def test_one_operation_may_be_passed_to_several_functions(alice, serve):
    shared = Operation.declare("tests.passed")
    serve(idempotent(shared)(plain_answer), **{"other/": idempotent(shared)(other)})
    assert alice.post(key="k").status_code == 201
    # The places share the operation's keys. A key used in the other place is refused, never replayed.
    assert_refused(alice, "idempotency_key_reused", "/other/", key="k")


@pytest.mark.parametrize(
    ("first", "second", "one"),
    [
        (("orders/", None), ("invoices/", None), False),
        (("orders/", "orders"), ("invoices/", "invoices"), False),
        (("orders/", "orders"), ("invoices/", None), False),
        (("orders/", "orders"), ("api/orders/", "orders"), True),
        (("orders", "orders"), ("orders/", "orders"), True),
        (("orders", None), ("orders/", None), True),
    ],
    ids=["no names", "two names", "one name", "a prefix", "a slash", "a slash and no name"],
)
def test_two_patterns_with_one_name_are_one_place(alice, settings, first, second, one):
    view = api_view(["POST"])(idempotent("tests.place")(drf_answer))
    settings.ROOT_URLCONF = tuple(path(route, view, name=name) for route, name in (first, second))
    answer = alice.post(f"/{first[0]}", key="k")
    if one:
        assert alice.post(f"/{second[0]}", key="k").content == answer.content
        assert effects() == 1
    else:
        assert_refused(alice, "idempotency_key_reused", f"/{second[0]}", key="k")


def test_two_viewsets_that_inherit_one_handler_are_two_places(alice, settings):
    class Creating(viewsets.ViewSet):
        create = idempotent("tests.create")(ModelActions.create)

        @action(detail=False, methods=["post"], url_path="create-too")
        @idempotent("tests.other")
        def create_too(self, request):
            return drf_answer(request)

        @idempotent("tests.above")
        @action(detail=False, methods=["post"])
        def above(self, request):
            return drf_answer(request)

    router = SimpleRouter()
    for name in ("orders", "invoices"):
        router.register(name, type(name, (Creating,), {}), basename=name)
    settings.ROOT_URLCONF = tuple(router.urls)
    for place in ("", "create-too/", "above/"):
        replayed(alice, f"/orders/{place}")
        assert_refused(alice, "idempotency_key_reused", f"/invoices/{place}", key="k")
