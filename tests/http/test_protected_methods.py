"""The methods that a declaration protects, and the declarations that are refused because they can't protect."""

from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import PermissionRequiredMixin
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.generic import FormView
from rest_framework import viewsets
from rest_framework.decorators import api_view
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import EVERY, Operation, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.models import IdempotencyRecord
from tests.http.callers import assert_refused, effects, replayed
from tests.http.serving import METHODS, WAYS, Creating, Declaring, EveryMethod, protecting, refused, runs_once
from tests.http.views import Methods, MethodView, ModelActions, PlainView, drf_answer, plain_answer

# Whether a method is protected is decided before the database is queried.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.once]


class Changing(viewsets.ViewSet):
    """One action, which its routes map to several methods."""

    def change(self, request):
        return drf_answer(request)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["decorator", "under another decorator", "mixin"])
def test_a_handler_is_protected_for_any_method(alice, serve, method, way):
    def handler(self, request):
        return plain_answer(request)

    name = handler.__name__ = method.lower()
    handler.__qualname__ = f"Decorated.{name}"
    view: Any
    if way == "mixin":
        view = protecting("mixin", type("Every", (EveryMethod, APIView), {}), {name: "tests.any"})
    else:
        decorated = idempotent("tests.any")(handler)
        if way == "under another decorator":
            decorated = method_decorator(never_cache)(decorated)
        view = type("Decorated", (EveryMethod, View), {name: decorated})
    serve(view.as_view())
    assert [served for served in METHODS if runs_once(alice, served)] == [method]
    assert IdempotencyRecord.objects.count() == 1


def test_the_put_of_a_form_view_is_protected_as_its_post(alice, serve, atomic):
    """Django's put() calls post()."""
    serve(type("Form", (FormView,), {"post": idempotent("tests.form")(PlainView.post)}).as_view())
    assert [method for method in ("POST", "PUT") if runs_once(alice, method)] == ["POST", "PUT"]


@pytest.mark.parametrize(
    ("method", "name"), [("PUT", "update"), ("PATCH", "partial_update"), ("DELETE", "destroy"), ("GET", "list")]
)
@pytest.mark.parametrize("way", WAYS)
def test_an_action_is_protected_by_any_method(alice, settings, method, name, way):
    def handler(self, request, **kwargs):
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
def test_the_safe_methods_of_a_handler_pass_through(alice, serve, way):
    view = protecting(way, Changing, {"change": "tests.change"})
    serve(view.as_view({"get": "change", "put": "change"}), **{"patch/": view.as_view({"patch": "change"})})
    assert runs_once(alice, "PUT")
    assert not runs_once(alice, "GET")
    assert alice.request("HEAD").status_code == 201
    assert runs_once(alice, "PATCH", "/patch/")


def test_head_of_a_protected_get_is_protected(alice, serve, atomic):
    serve(protecting("decorator", PlainView, {"get": "tests.get"}).as_view())
    assert alice.request("HEAD").status_code == 400


def test_a_protected_handler_called_by_another_handler_is_protected(alice, serve):
    class Delegating(MethodView):
        pay = idempotent("tests.helper")(PlainView.post)

        def get(self, request):
            return self.post(request)

        def delete(self, request):
            return self.pay(request)

        put, options, trace = get, delete, delete

    serve(Delegating.as_view())
    # A method that is not a handler lets safe requests pass through.
    called = [method for method in ("PUT", "GET", "DELETE", "OPTIONS", "TRACE") if runs_once(alice, method)]
    assert called == ["PUT", "GET", "DELETE"]


@pytest.mark.scenario_11
@pytest.mark.parametrize(
    ("kind", "view"),
    [
        ("function", lambda: idempotent("tests.any")(plain_answer)),
        ("drf", lambda: api_view([*METHODS, "HEAD", "OPTIONS"])(idempotent("tests.any")(drf_answer))),
        ("class", lambda: idempotent("tests.any")(type("Every", (EveryMethod, View), {}).as_view())),
    ],
)
@pytest.mark.parametrize("key", [None, "k", "a,b"], ids=["no key", "key", "bad key"])
def test_a_function_is_protected_by_post_and_patch_only(alice, serve, kind, view, key):
    serve(view())
    assert runs_once(alice, "POST")
    assert runs_once(alice, "PATCH")
    for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS"):
        before = effects()
        answer = alice.request(method, key=key)
        # The framework answers OPTIONS for a class. For a function, the handler does.
        of_framework = method == "OPTIONS" and kind == "class"
        assert (answer.status_code, effects() - before) == ((200, 0) if of_framework else (201, 1))
        assert not {"Idempotency-Key", "Idempotency-Replayed"} & {*answer.headers}
    assert IdempotencyRecord.objects.count() == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_function_that_serves_none_of_the_methods_is_protected(alice, serve, method):
    only = type("Only", (View,), {method.lower(): EveryMethod.get})
    drf = api_view([method])(idempotent("tests.drf")(drf_answer))
    serve(drf, **{"class/": idempotent("tests.class")(only.as_view())})
    assert runs_once(alice, method)
    assert runs_once(alice, method, "/class/")


def test_the_safe_methods_of_a_class_pass_through_beside_unsafe_ones(alice, serve):
    both = type("Both", (View,), {"get": EveryMethod.get, "put": EveryMethod.get})
    serve(idempotent("tests.both")(both.as_view()))
    assert [alice.request(method).status_code for method in ("GET", "HEAD", "PUT")] == [201, 201, 400]


def test_an_operations_methods_override_the_defaults(alice, serve):
    class Service:  # not a view, so its method is treated as a function
        run = idempotent("tests.service")(PlainView.post)

        @classmethod
        def as_view(cls):
            return lambda request: cls().run(request)

    view = protecting("mixin", Changing, {"change": Operation.declare("tests.change", methods=("PATCH",))})
    function = idempotent("tests.put", methods=["PUT"])(plain_answer)
    routed = view.as_view({"put": "change", "patch": "change"})
    serve(routed, **{"function/": function, "service/": Service.as_view()})
    for url, protected, other in (("/", "PATCH", "PUT"), ("/function/", "PUT", "POST"), ("/service/", "POST", "PUT")):
        assert [runs_once(alice, method, url) for method in (protected, other)] == [True, False]


def test_a_function_without_any_of_its_operations_methods_is_refused():
    with refused("protects nothing: PlainView.as_view() serves GET, HEAD, POST"):
        idempotent("tests.class", methods=("PUT",))(PlainView.as_view())


@pytest.mark.parametrize("way", WAYS)
def test_a_handler_without_any_of_its_operations_methods_is_refused(way):
    post_only = Operation.declare("tests.post", methods=("POST",))
    with refused("protects nothing: Put.put serves PUT, and its methods are POST"):
        protecting(way, type("Put", (Methods, APIView), {}), {"put": post_only})
    # An action's methods are known only from its route.
    view = protecting(way, ModelActions, {"update": post_only})
    view.as_view({"get": "list", "post": "update"})
    with refused("protects nothing: ModelActions.update, as routed, serves PUT"):
        view.as_view({"get": "list", "put": "update"})


def test_wrong_mappings_are_refused():
    with refused("must map handler names to operations"):
        type("Listed", (IdempotentMixin, APIView), {"idempotent_operations": ["post"]})
    with refused("or be EVERY: 'post'"):
        type("Wrong", (IdempotentMixin, View), {"idempotent_operations": "post"})
    assert repr(EVERY) == "EVERY"
    with refused("names 'creat', but Misspelt has no such handler"):
        type("Misspelt", (IdempotentMixin, viewsets.ViewSet), {"idempotent_operations": {"creat": "tests.misspelt"}})
    with refused("before authentication"):
        protecting("mixin", APIView, {"dispatch": "tests.dispatch"})
    with refused("'tests.mixin', but @idempotent on the method gives it to 'declarations.creating'"):
        protecting("mixin", type("Twice", (Creating, APIView), {}), {"post": "tests.mixin"})
    mixed = type("Mixed", (IdempotentMixin, Methods, APIView), {})
    with refused("is an attribute of the class Mixed, not an argument of as_view()"):
        mixed.as_view(idempotent_operations={"post": "tests.late"})


class Permitted(PermissionRequiredMixin, PlainView):
    permission_required = "testproject.add_transfer"


def test_the_decorator_in_method_decorator_or_without_a_name_is_refused():
    """``method_decorator`` would hide the protection from the class."""

    def post(self, request): ...

    decorate = idempotent("tests.hidden")
    with refused("Put it on the method itself, without method_decorator(),"):
        method_decorator(decorate)(post)
    for name in ("post", "dispatch"):
        with refused("post = idempotent('tests.hidden')(Base.post)"):
            method_decorator([never_cache, decorate], name=name)(type("Hidden", (PlainView,), {}))
    with refused('write @idempotent("orders.create") above tests.http.views.plain_answer.'):
        idempotent(plain_answer)
    with refused('write @idempotent("orders.create").'):
        idempotent()


@pytest.mark.failure_91
def test_the_decorator_above_an_authentication_check_is_refused():
    decorated = method_decorator(login_required, name="dispatch")(type("Login", (PlainView,), {}))
    for view in (Permitted.as_view(), decorated.as_view(), login_required(decorated.as_view()), api_view()(drf_answer)):
        with refused("so a replay would skip dispatch(), which may check a login or a permission"):
            idempotent("tests.checked")(view)
    with refused("above django.contrib.auth.decorators.user_passes_test"):
        idempotent("tests.checked")(login_required(plain_answer))
    below = type("Below", (APIView,), {"post": method_decorator(login_required)(Methods.post)})
    with refused("above django.contrib.auth.decorators.user_passes_test"):
        protecting("mixin", below, {"post": "tests.below"})


@pytest.mark.parametrize(
    ("base", "name"),
    [*[(base, name) for base in (View, APIView) for name in ("dispatch", "setup")], (APIView, "initial")],
)
def test_a_protected_hook_is_refused_and_a_hidden_one_stops_the_request(alice, serve, caplog, base, name):
    def hook(self, request, *args, **kwargs):
        getattr(super(view, self), name)(request, *args, **kwargs)

    def post(self, request):
        ran.append(request)

    ran = []
    why = "where it would run before" if name == "dispatch" else "which is not a handler: its return value is ignored"
    hook.__name__, hook.__qualname__ = name, f"Shop.{name}"
    for way in WAYS:
        with refused(f"Operation 'tests.refused' is declared for Shop.{name}, {why}"):
            protecting(way, type("Shop", (base,), {name: hook}), {name: Operation.declare("tests.refused")})
    decorated = method_decorator(never_cache)(idempotent("tests.hook")(hook))
    view = type("Shop", (base,), {name: decorated, "post": post})
    serve(view.as_view())
    assert alice.post(key="k").status_code == 500
    assert (ran, f"Operation 'tests.hook' is declared for Shop.{name}, {why}" in caplog.text) == ([], True)
    guarded = type("Guarded", (view,), {"put": idempotent("tests.put")(post)})
    with refused(f"Operation 'tests.hook' is declared for Guarded.{name}, {why}"):
        guarded.as_view()


def test_a_handler_replaced_after_its_class_was_made_is_refused():
    mixed = type("Mixed", (Declaring, Methods, APIView), {})
    mixed.as_view()
    mixed.post = Methods.post
    with refused("post was replaced after the class was made, so Operation 'tests.declaring' does not protect it"):
        mixed.as_view()
