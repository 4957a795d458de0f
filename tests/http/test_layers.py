"""Decorators below a protection: only those that check nothing are allowed."""

import functools
from contextlib import ContextDecorator

import pytest
from asgiref.sync import async_to_sync, markcoroutinefunction, sync_to_async
from django.contrib.auth.decorators import login_required, permission_required
from django.db import transaction
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import etag, require_POST
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import viewsets
from rest_framework.decorators import action

from idempotency import EVERY, PARK, IdempotentMixin, checks_nothing, idempotent
from idempotency.http.protection import protection_of
from idempotency.http.stack import class_of
from tests.http.callers import assert_refused, replayed
from tests.http.serving import Calling, protecting, refused
from tests.http.views import AsyncView, ModelActions, PlainView, async_answer, plain_answer

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.failure_62,
    pytest.mark.failure_108,
    pytest.mark.once,
]


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


def made_from_text(view):
    """As boltons, makefun and ``decorator`` 4 make their wrappers: the view is a global."""
    namespace = {"call": checking(view)}
    exec(compile("def wrapper(*args): return call(*args)", "<made>", "exec"), namespace)
    return functools.wraps(view)(namespace["wrapper"])


class Slotted:
    __slots__ = ("unset", "view")

    def __init__(self, view):
        self.view = view

    def __call__(self, *args):
        return self.view(*args)

    def __get__(self, instance, owner=None):
        return self

    def handle(self, *args):
        return self.view(*args)


class Proxy:
    """Gets each attribute from the view, like wrapt's proxies."""

    def __init__(self, view):
        self.__wrapped__ = view

    @property
    def __class__(self):
        return type(self.__wrapped__)

    def __call__(self, *args):
        return self.__wrapped__(*args)


class Locked(ContextDecorator):
    def __enter__(self): ...

    def __exit__(self, *args): ...


class Retried(transaction.Atomic):
    pass


def checked(view, *args):
    return view(*args)


def around(called):
    return lambda *args: called(*args)


def by_list(view):
    steps = [view]
    return functools.wraps(view)(lambda *args: steps[0](*args))


REFUSED = {
    "login_required": method_decorator(login_required),
    "several": method_decorator([never_cache, permission_required("auth.add_user")]),
    "require_POST": method_decorator(require_POST),
    "a project's": checking,
    "object": Calling,
    "slots": Slotted,
    "a method of an object": lambda view: Slotted(view).handle,
    "proxy": Proxy,
    "async_to_sync": lambda view: async_to_sync(markcoroutinefunction(checking(async_answer))),
    "cached": functools.lru_cache,
    "a lock": Locked(),
    "a subclass of atomic": Retried("default", True, False),
    "a partial": lambda view: functools.wraps(view)(functools.partial(checked, view)),
    "a bare partial": lambda view: functools.partial(checked, view),
    "around a partial": lambda view: functools.wraps(view)(around(functools.partial(checked, view))),
    "a default": lambda view: functools.wraps(view)(lambda *args, view=view: view(*args)),
    "a list": by_list,
    "made from text": made_from_text,
    "found when called, as by a name": lambda view: functools.wraps(view)(lambda *args: None),
    "a check below a harmless one": lambda view: functools.update_wrapper(csrf_exempt(checking(view)), view),
}


@pytest.mark.parametrize("decorate", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("way", ["decorator", "mixin", "mixin above an inherited one"])
def test_any_other_decorator_is_refused_at_declaration(decorate, way):
    base = type("Base", (View,), {"post": decorate(PlainView.post)})
    with refused("which a replay would not run"):
        if way == "decorator":
            idempotent("layers.refused")(vars(base)["post"])
        elif way == "mixin":
            namespace = {**vars(base), "idempotent_operations": {"post": "layers.refused"}}
            type("Own", (IdempotentMixin, View), {name: namespace[name] for name in ("post", "idempotent_operations")})
        else:
            protecting("mixin", base, {"post": "layers.refused"})


def test_a_refusal_names_what_to_do():
    remedy = "If it checks the caller or the request, or takes a lock, put @idempotent('layers.x') below it"
    with refused(f"above {__name__}.Locked, which a replay would not run. {remedy}"):
        idempotent("layers.x")(Locked()(plain_answer))


def test_a_decorated_action_is_refused_by_the_mixin():
    with refused("put @idempotent('layers.pay') below it, closest to the function"):

        class Above(IdempotentMixin, viewsets.ViewSet):
            idempotent_operations = {"pay": "layers.pay"}

            @action(detail=False, methods=["post"])
            @checking
            def pay(self, request): ...


WITHOUT_WRAPS = "above tests.http.test_layers.checking_without_wraps"


def test_a_decorator_without_wraps_is_refused_on_a_method():
    base = type("Base", (View,), {"post": checking_without_wraps(PlainView.post)})
    with refused("If it makes the handler, call the handler in a method instead."):
        protecting("mixin", base, {"post": "layers.hidden"})
    with refused(WITHOUT_WRAPS):
        type("Own", (IdempotentMixin, View), {"post": base.post, "idempotent_operations": {"post": "layers.hidden"}})
    with refused(WITHOUT_WRAPS):
        type("Own", (View,), {"post": idempotent("layers.hidden")(base.post)})
    hidden = type("Hidden", (View,), {"post": never_cache(idempotent("layers.hidden")(base.post))})
    with refused(WITHOUT_WRAPS):
        type("Sub", (hidden, IdempotentMixin), {"idempotent_operations": EVERY})


def test_a_function_that_a_factory_makes_may_be_a_handler(alice, serve):
    def make(answer):
        return lambda request: answer(request)

    class Made(View):
        def answer(self, request):
            return made(request)

        post = idempotent("layers.made")(answer)

    made = make(plain_answer)
    serve(idempotent("layers.factory")(made), **{"method/": Made.as_view()})
    replayed(alice)
    replayed(alice, "/method/")


def test_a_handler_of_a_class_in_between_is_checked():
    protected = protecting("mixin", PlainView, {"post": "layers.between"})
    between = type("Between", (PlainView,), {"post": checking(PlainView.post)})
    with refused("above tests.http.test_layers.checking"):
        type("Both", (protected, between), {})
    type("Other", (protected, type("Between", (PlainView,), {"post": idempotent("layers.o")(PlainView.post)})), {})


@pytest.mark.parametrize("checks", [checking, lambda post: checking(idempotent("layers.below")(post))])
def test_an_override_is_refused_if_it_may_call_a_checked_method(checks):
    class Base(View):
        post = checks(PlainView.post)

    def post(self, request):
        return super(Base, self).post(request)

    with refused("above tests.http.test_layers.checking"):
        protecting("mixin", type("Own", (Base,), {"post": post}), {"post": "layers.override"})
    with refused("above tests.http.test_layers.checking"):
        type("Own", (Base,), {"post": idempotent("layers.override")(post)}).as_view()


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_static_or_class_method_is_refused(kind):
    namespace = {"post": kind(lambda *args: plain_answer(args[-1]))}
    with refused(f"Static.post, which is a {kind.__name__}. Make it a method."):
        type("Static", (IdempotentMixin, View), {**namespace, "idempotent_operations": EVERY})


@pytest.mark.failure_107
def test_no_value_that_a_decorator_holds_is_evaluated():
    def evaluate():
        raise AssertionError

    lazy = SimpleLazyObject(evaluate)
    steps = [lazy]
    steps.append(steps)

    def view(request, lazy=lazy):
        return plain_answer(request, steps)

    @functools.wraps(view)
    def wrapper(request):
        return view(request, lazy, steps, later)

    view.__wrapped__ = wrapper
    with refused("above tests.http.test_layers"):
        idempotent("layers.lazy")(wrapper)
    assert protection_of(wrapper) is None
    assert class_of(wrapper) is None
    assert idempotent("layers.partial")(functools.partial(lambda lazy, request: None, lazy))
    later = None


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
    with refused("put idempotency.checks_nothing() around the decorator"):
        idempotent("layers.traced")(traced("a")(plain_answer))
    serve(idempotent("layers.traced")(never_cache(checks_nothing(traced("a"))(plain_answer))))
    replayed(alice)
    assert idempotent("layers.async")(checks_nothing(traced("a"))(async_answer))
    assert idempotent("layers.method")(method_decorator(checks_nothing(traced("a")))(PlainView.post))

    @checks_nothing
    def without_wraps(view):
        return lambda *args: view(*args)

    protecting("mixin", type("Base", (View,), {"post": without_wraps(PlainView.post)}), {"post": "layers.lambda"})


@pytest.mark.parametrize(
    "above",
    [
        checking,
        traced("b"),
        checking_without_wraps,
        lambda view: functools.update_wrapper(checking_without_wraps(view), view),
    ],
)
@pytest.mark.parametrize("where", ["above", "below"])
def test_only_the_declared_use_of_a_decorator_is_allowed(above, where):
    """A decorator from the same factory, or one that copies the attributes of a declared one, may check something."""
    declared = checks_nothing(traced("a"))
    post = above(declared(PlainView.post)) if where == "above" else declared(above(PlainView.post))
    with refused("above tests.http.test_layers."):
        type("Own", (View,), {"post": idempotent("layers.shared")(post)})


def test_a_factory_is_not_a_decorator_that_checks_nothing():
    with pytest.raises(TypeError, match=r"tests.http.test_layers.traced. .* checks_nothing\(decorator\(…\)\)"):
        checks_nothing(traced)("a name")
    with refused("above tests.http.test_layers.traced"):  # it took the view for a name, or a function for the view
        idempotent("layers.factory")(checks_nothing(traced)(len)(plain_answer))


@pytest.mark.parametrize("decorator", [lambda view: None, len, lambda view: vars(Slotted)["handle"].__get__(1)])
def test_a_wrapper_that_can_not_be_marked_is_an_error(decorator):
    with pytest.raises(TypeError, match=r"checks_nothing\(\)|len"):
        checks_nothing(decorator)(plain_answer)


def test_a_decorator_may_return_the_view_itself():
    assert checks_nothing(lambda view: view)(plain_answer) is plain_answer


def test_schema_descriptions_of_inherited_actions_are_allowed(alice, serve):
    described = extend_schema_view(create=extend_schema(summary="x"))(type("Described", (ModelActions,), {}))
    view = protecting("mixin", described, {"create": "layers.described"})
    serve(view.as_view({"post": "create"}))
    replayed(alice)
    assert_refused(alice, "idempotency_key_missing")
