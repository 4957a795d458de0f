"""Decorators below a protection: only those that check nothing are allowed."""

import functools
from inspect import iscoroutinefunction

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.decorators import login_required, permission_required, user_passes_test
from django.db import transaction
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import etag, require_POST
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import viewsets
from rest_framework.decorators import action

from idempotency import PARK, IdempotentMixin, checks_nothing, idempotent
from idempotency.http import layers
from tests.http.callers import assert_refused, replayed
from tests.http.serving import Calling, protecting, refused
from tests.http.views import AsyncView, ModelActions, PlainView, async_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.once]


@pytest.fixture(autouse=True)
def _forget_harmless(monkeypatch):
    monkeypatch.setattr(layers, "_harmless", {*layers._harmless})


def checking(view):
    """A decorator that may check the caller."""

    @functools.wraps(view)
    def wrapper(*args, **kwargs):
        return view(*args, **kwargs)

    return wrapper


def checking_without_wraps(view):
    def inner(self, request):
        return view(self, request)

    return inner


def traced(name):
    def decorate(view):
        @functools.wraps(view)
        def wrapper(*args, **kwargs):
            return view(*args, **kwargs)

        return wrapper

    return decorate


HARMLESS = {
    "atomic": transaction.atomic,
    "atomic of a database": transaction.atomic(using="default"),
    "csrf_exempt": csrf_exempt,
    "never_cache": never_cache,
    "cache_control": cache_control(private=True, max_age=3),
    "sensitive_post_parameters": sensitive_post_parameters("pin"),
    "a precondition": etag(lambda request: '"1"'),
    "sensitive_variables": sensitive_variables("pin"),
    "extend_schema": extend_schema(summary="x"),
}


@pytest.mark.parametrize("decorator", HARMLESS.values(), ids=HARMLESS)
def test_a_decorator_that_checks_nothing_may_be_below_a_protection(alice, serve, decorator):
    class Decorated(View):
        post = method_decorator(decorator)(PlainView.post)

    by_mixin = type("Mixed", (IdempotentMixin, Decorated), {"idempotent_operations": {"post": "layers.mixed"}})
    function = idempotent("layers.function")(decorator(lambda request: plain_answer(request)))
    serve(by_mixin.as_view(), **{"function/": function})
    for url in ("/", "/function/"):
        replayed(alice, url, key=url)


@pytest.mark.parametrize("view", [sync_to_async(plain_answer), async_to_sync(async_answer)], ids=["async", "sync"])
def test_a_view_may_be_adapted_below_a_protection(alice, serve, view):
    serve(idempotent("layers.adapted")(view))
    replayed(alice)


def test_a_decorator_that_checks_nothing_may_be_on_an_async_view(alice, serve):
    serve(idempotent("layers.async")(never_cache(async_answer)))
    replayed(alice)
    idempotent("layers.method")(method_decorator(never_cache)(AsyncView.post))


REFUSED = {
    "login_required": method_decorator(login_required),
    "a list": method_decorator([never_cache, permission_required("auth.add_user")]),
    "require_POST": method_decorator(require_POST),
    "a project's": checking,
    "object": Calling,
}


@pytest.mark.parametrize("decorate", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("way", ["decorator", "mixin", "mixin above an inherited one"])
def test_any_other_decorator_is_refused_at_declaration(decorate, way):
    base = type("Base", (View,), {"post": decorate(PlainView.post)})
    with refused("which a replay would not run"):
        if way == "decorator":
            idempotent("layers.refused")(base.post)
        elif way == "mixin":
            namespace = {"post": base.post, "idempotent_operations": {"post": "layers.refused"}}
            type("Own", (IdempotentMixin, View), namespace)
        else:
            protecting("mixin", base, {"post": "layers.refused"})


def test_a_decorated_action_is_refused_by_the_mixin():
    with refused("put @idempotent('layers.pay') below it, closest to the function"):

        class Above(IdempotentMixin, viewsets.ViewSet):
            idempotent_operations = {"pay": "layers.pay"}

            @action(detail=False, methods=["post"])
            @checking
            def pay(self, request): ...


def test_a_decorator_without_wraps_is_refused_by_the_mixin(alice, serve):
    base = type("Base", (View,), {"post": checking_without_wraps(PlainView.post)})
    with refused("above tests.http.test_layers.checking_without_wraps"):
        protecting("mixin", base, {"post": "layers.hidden"})
    own = {"post": base.post, "idempotent_operations": {"post": "layers.hidden"}}
    with refused("above tests.http.test_layers.checking_without_wraps"):
        type("Own", (IdempotentMixin, View), own)


def test_a_handler_of_a_class_in_between_is_checked():
    protected = protecting("mixin", PlainView, {"post": "layers.between"})
    between = type("Between", (PlainView,), {"post": checking(PlainView.post)})
    with refused("above tests.http.test_layers.checking"):
        type("Both", (protected, between), {})
    type("Other", (protected, type("Between", (PlainView,), {"post": idempotent("layers.o")(PlainView.post)})), {})


def test_around_as_view_the_handlers_of_the_class_are_checked():
    view = type("Checking", (PlainView,), {"post": checking(PlainView.post)})
    with refused("above tests.http.test_layers.checking"):
        idempotent("layers.class")(view.as_view())
    safe = type("Reading", (PlainView,), {"get": checking(PlainView.post)})
    assert idempotent("layers.class")(safe.as_view())


def test_a_durable_transaction_is_refused_below_and_any_on_dispatch():
    durable = transaction.atomic(durable=True)
    for decorated in (durable(plain_answer), method_decorator(durable)(PlainView.post)):
        with refused("above atomic(durable=True), which Django refuses"):
            idempotent("layers.durable")(decorated)
    assert idempotent("layers.outside", transaction=False, recovery=PARK)(durable(plain_answer))
    view = protecting("mixin", PlainView, {"post": "layers.dispatch"})
    view = method_decorator(transaction.atomic, name="dispatch")(view)
    with refused("transaction.atomic is on PlainView.dispatch()"):
        view.as_view()


def test_a_project_can_declare_a_decorator_that_checks_nothing(alice, serve):
    with refused("declare that with idempotency.checks_nothing()"):
        idempotent("layers.traced")(traced("a")(plain_answer))
    assert checks_nothing(traced("b"))
    serve(idempotent("layers.traced")(traced("a")(plain_answer)))
    replayed(alice)
    idempotent("layers.async")(traced("a")(async_answer))

    @checks_nothing
    def without_wraps(view):
        return lambda *args: view(*args)

    protecting("mixin", type("Base", (View,), {"post": without_wraps(PlainView.post)}), {"post": "layers.lambda"})
    with pytest.raises(TypeError, match="makes a function around the view"):
        checks_nothing(lambda view: view)


def test_a_decorator_that_shares_its_code_with_a_harmless_one_is_refused():
    """``login_required`` is made by ``user_passes_test`` too."""
    checks_nothing(user_passes_test(lambda user: True))
    with refused("above django.contrib.auth.decorators.user_passes_test"):
        idempotent("layers.shared")(login_required(plain_answer))


def test_a_decorator_for_sync_views_only_may_be_declared():
    def sync_only(view):
        if iscoroutinefunction(view):
            raise TypeError

        @functools.wraps(view)
        def wrapper(*args, handlers={}, **kwargs):  # noqa: B006
            return view(*args, {"one": [wrapper]}, known, **kwargs)

        known = {"names": [len]}
        return wrapper

    assert idempotent("layers.sync")(checks_nothing(sync_only)(plain_answer))


def test_schema_descriptions_of_inherited_actions_are_allowed(alice, serve):
    described = extend_schema_view(create=extend_schema(summary="x"))(type("Described", (ModelActions,), {}))
    view = protecting("mixin", described, {"create": "layers.described"})
    serve(view.as_view({"post": "create"}))
    replayed(alice)
    assert_refused(alice, "idempotency_key_missing")
