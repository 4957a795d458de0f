"""``EVERY``: a base class protects the unsafe handlers of its subclasses for requests with a key."""

import pytest
from django.contrib.auth.decorators import permission_required
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework import viewsets
from rest_framework.decorators import action
from rest_framework.views import APIView

from idempotency import EVERY, IdempotentMixin, idempotent
from idempotency.models import IdempotencyRecord
from tests.http.callers import assert_refused, effects, records, replayed
from tests.http.serving import Calling, EveryMethod, refused
from tests.http.views import AsyncView, Methods, ModelActions, PlainView, drf_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


class Base(IdempotentMixin):
    idempotent_operations = EVERY


class Plain(Base, EveryMethod, View):
    pass


class Child(Plain):
    def post(self, request):
        return super().post(request=request)


class Asynchronous(Base, AsyncView):
    pass


class OfDrf(Base, Methods, APIView):
    pass


class Shop(Base, ModelActions):
    pay = method_decorator(permission_required("auth.add_user"))(idempotent("every.pay")(ModelActions.pay))

    @action(detail=False, methods=["post", "get"])
    def both(self, request):
        return drf_answer(request)

    def custom(self, request):
        return drf_answer(request)


class Own(Plain):
    idempotent_operations = {"put": "every.own"}


class Again(Own):
    idempotent_operations = EVERY


class Nothing(Plain):
    idempotent_operations = {}

    def patch(self, request):
        return super().post(request)


@method_decorator(permission_required("auth.add_user", raise_exception=True), name="post")
class Permitted(Base, PlainView):
    pass


VIEWS = {
    "Plain.post": Plain.as_view(),
    "Child.post": Child.as_view(),
    "Asynchronous.post": Asynchronous.as_view(),
    "OfDrf.post": OfDrf.as_view(),
    "Shop.create": Shop.as_view({"post": "create", "get": "list"}),
    "Shop.both": Shop.as_view({"post": "both", "get": "both"}),
    "Shop.custom": Shop.as_view({"post": "custom", "get": "list"}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_handler_is_protected_under_the_name_of_its_class(alice, serve, name, atomic):
    if atomic and "Async" in name:
        pytest.skip("Django refuses async views with ATOMIC_REQUESTS")
    serve(VIEWS[name])
    replayed(alice)
    assert IdempotencyRecord.objects.get().operation == f"{__name__}.{name}"
    before = effects()
    answer = alice.post()
    assert (answer.status_code, answer.json()["operation"], answer.json()["in_transaction"]) == (201, None, atomic)
    assert alice.get(key="k").json()["operation"] is None
    assert effects() == before + 2


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_every_unsafe_method_is_protected(alice, serve, method):
    serve(VIEWS["Plain.post"])
    replayed(alice, method=method)


def test_an_explicit_operation_overrides_every(alice, serve):
    serve(
        VIEWS["Plain.post"],
        **{"own/": Own.as_view(), "pay/": Shop.as_view({"post": "pay"})},
        **{"again/": Again.as_view(), "nothing/": Nothing.as_view()},
    )
    replayed(alice, "/own/", method="PUT")
    assert_refused(alice, "idempotency_key_missing", "/own/", method="PUT")
    assert IdempotencyRecord.objects.get().operation == "every.own"
    # A mapping replaces EVERY.
    assert alice.post("/own/", key="k").json()["operation"] is None
    assert alice.post("/nothing/", key="k").json()["operation"] is None
    assert alice.post("/again/", key="k").json()["operation"] == f"{__name__}.Again.post"
    assert alice.request("PUT", "/again/", key="j").json()["operation"] == "every.own"
    assert alice.post("/", key="k").json()["operation"] == f"{__name__}.Plain.post"
    assert alice.post("/pay/", key="k").status_code == 302


def test_a_decorator_of_the_class_runs_above_the_protection(alice, serve):
    serve(Permitted.as_view())
    assert alice.post(key="k").status_code == 403
    assert records() == []


def test_a_decorator_that_a_replay_would_skip_is_refused():
    with refused("above django.contrib.auth.decorators.user_passes_test"):

        class Above(Base, View):
            @method_decorator(permission_required("auth.add_user"))
            def post(self, request): ...

    with refused("above tests.http.serving.Calling"):
        type("Hidden", (Base, View), {"post": Calling(PlainView.post)})
    late = type("Late", (Base, viewsets.ViewSet), {"late": Calling(PlainView.post), "__module__": __name__})
    globals()["Late"] = late
    with refused("above tests.http.serving.Calling"):
        late.as_view({"post": "late"})


def test_a_class_defined_in_a_function_is_refused_when_routed():
    class Local(Base, PlainView):
        pass

    with refused("which does not lead to it"):
        Local.as_view()
    with refused("which does not lead to it"):
        type("Plain", (Base, PlainView), {"__module__": __name__}).as_view()
