"""Routers protect the unsafe actions of their viewsets without changing the viewsets or their URLs."""

import json

import pytest
from django.db import transaction
from django.urls import include, path, resolve, reverse
from django.utils.decorators import method_decorator
from drf_spectacular import openapi
from drf_spectacular.generators import SchemaGenerator
from rest_framework import mixins, routers, viewsets
from rest_framework.decorators import action
from rest_framework.permissions import BasePermission

from idempotency import IdempotentMixin, idempotent
from idempotency.contrib.rest_framework.routers import DefaultRouter, SimpleRouter
from idempotency.models import IdempotencyRecord
from idempotency.views.checks import check_atomic_requests
from idempotency.views.route_audit import audit
from testproject.models import Transfer
from tests.http.callers import assert_refused, effects, records, replayed
from tests.http.serving import Calling, refused
from tests.http.views import Actions, LabelSerializer, drf_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


class Stock(Actions, mixins.UpdateModelMixin, viewsets.GenericViewSet):
    queryset = Transfer.objects.all()
    serializer_class = LabelSerializer

    def update(self, request, *args, **kwargs):
        return self.answer(request=request)

    def partial_update(self, request, *args, **kwargs):
        return self.update(*args, request=request, **kwargs)

    def answer(self, request):
        assert type(self) is Stock
        return drf_answer(request)

    @action(detail=True, methods=["post", "get"])
    def both(self, request, pk):
        return drf_answer(request)

    @both.mapping.delete
    def both_deleted(self, request, pk):
        return drf_answer(request)


class Denied(BasePermission):
    allowed = True

    def has_permission(self, request, view):
        return self.allowed


class Mixed(IdempotentMixin, Actions, viewsets.ViewSet):
    idempotent_operations = {"create": "routers.create"}
    permission_classes = [Denied]
    destroy = idempotent("routers.destroy")(lambda self, request, pk: drf_answer(request))


class Dropping(Actions, viewsets.ViewSet):
    def __init__(self, **kwargs):
        super().__init__()


class Raw(Actions, viewsets.ViewSet):
    @action(detail=False, methods=["post"])
    def raw(self, request):
        return self.create(request)

    def create(self, request):
        return drf_answer(request)

    def update(self, request, pk):
        return self.partial_update(request._request, pk)

    partial_update = create


class Checked(Actions, viewsets.ViewSet):
    create = Calling(Actions.create)


@method_decorator(transaction.atomic, name="dispatch")
class InTransaction(Actions, viewsets.ViewSet):
    pass


@pytest.fixture
def route(settings):
    def register(viewset, router=None):
        router = router or SimpleRouter()
        router.register("stock", viewset, basename="stock")
        settings.ROOT_URLCONF = tuple(router.urls)

    return register


CALLS = [
    ("POST", "/stock/", "create"),
    ("PUT", "/stock/1/", "update"),
    ("PATCH", "/stock/1/", "partial_update"),
    ("POST", "/stock/1/both/", "both"),
    ("DELETE", "/stock/1/both/", "both_deleted"),
    ("POST", "/stock/pay/", "pay"),
]


@pytest.mark.parametrize(("method", "url", "name"), CALLS)
def test_an_action_is_protected_under_the_name_of_its_class(alice, route, method, url, name, atomic):
    route(Stock, DefaultRouter() if atomic else SimpleRouter())
    replayed(alice, url, method=method)
    assert IdempotencyRecord.objects.get().operation == f"{__name__}.Stock.{name}"
    before = effects()
    answer = alice.request(method, url)
    assert (answer.status_code, answer.json()["operation"], answer.json()["in_transaction"]) == (201, None, atomic)
    assert effects() == before + 1
    assert alice.get("/stock/", key="k").json()["in_transaction"] == atomic
    assert check_atomic_requests(None) == []


@pytest.mark.usefixtures("atomic_requests")
def test_the_audit_lists_an_action_once_despite_its_format_suffix_route(route):
    route(Stock, DefaultRouter())
    found = {each.route for each in audit().routes if each.operation is not None}
    assert "/stock/<pk>/" in found
    assert not any("<format>" in each for each in found)


def test_an_action_that_has_an_operation_keeps_it(alice, route, monkeypatch):
    route(Mixed)
    replayed(alice, "/stock/")
    assert_refused(alice, "idempotency_key_missing", "/stock/")
    replayed(alice, "/stock/1/", method="DELETE")
    replayed(alice, "/stock/pay/")
    names = set(IdempotencyRecord.objects.values_list("operation", flat=True))
    assert names == {"routers.create", "routers.destroy", f"{__name__}.Mixed.pay"}
    monkeypatch.setattr(Denied, "allowed", False)
    assert alice.post("/stock/", key="k").status_code == 403


def test_the_class_and_its_urls_are_unchanged(route):
    Stock.as_view({"post": "create"})  # the first call sets class attributes
    Stock.__annotations__  # noqa: B018 - created on first access
    before = dict(vars(Stock))
    route(Stock)
    assert dict(vars(Stock)) == before
    callback = resolve("/stock/").func
    assert (callback.cls, callback.__name__) == (Stock, "Stock")
    assert reverse("stock-list") == reverse(callback) == "/stock/"


def test_a_handler_is_looked_up_at_the_call(alice, route, monkeypatch):
    route(Stock)
    monkeypatch.setattr(Stock, "create", lambda self, request: Stock.answer(self, request))
    replayed(alice, "/stock/")


def schema(router):
    document = SchemaGenerator(patterns=[path("", include(router.urls))]).get_schema(request=None, public=True)
    return document["paths"]


def test_a_projects_schema_is_unchanged_and_the_default_describes_the_key(monkeypatch):
    both = SimpleRouter(), routers.SimpleRouter()
    for made in both:
        made.register("stock", Stock, basename="stock")
    described = schema(both[0])
    monkeypatch.setattr(Stock, "schema", openapi.AutoSchema())
    assert json.dumps(schema(both[0])) == json.dumps(schema(both[1]))
    named = {
        (url, method): [parameter["name"] for parameter in operation.get("parameters", [])]
        for url, methods in described.items()
        for method, operation in methods.items()
    }
    expected = {(url.replace("1", "{id}"), method.lower()) for method, url, _ in CALLS}
    expected.add(("/stock/unprotected/", "post"))
    assert {place for place, names in named.items() if "Idempotency-Key" in names} == expected


def test_an_init_that_drops_its_arguments_is_refused(route):
    with refused("Dropping.__init__() drops its keyword arguments, so the router can't protect create()"):
        route(Dropping)


def test_a_decorator_that_a_replay_would_skip_is_refused(route):
    with refused("above tests.http.serving.Calling"):
        route(Checked)


@pytest.mark.parametrize("name", ["delete", "post", "name", "actions"])
def test_an_action_under_a_name_of_drf_is_refused_without_an_operation(alice, route, name):
    def handle(self, request, pk=None):
        return drf_answer(request)

    handle.__name__ = name
    as_action = action(detail=True, methods=["post"], url_path="stop")
    viewset = type("Named", (viewsets.ViewSet,), {name: as_action(handle), "__module__": __name__})
    globals()["Named"] = viewset
    with refused(f"The router can't protect the action {name!r} of {__name__}.Named, because"):
        route(viewset)
    if name in ("delete", "post"):  # DRF can't route the others either
        setattr(viewset, name, as_action(idempotent(f"routers.{name}")(handle)))
        route(viewset)
        replayed(alice, "/stock/1/stop/")


def test_a_viewset_in_a_transaction_is_refused(route):
    with refused("transaction.atomic is on InTransaction.dispatch()"):
        route(InTransaction)


def test_a_viewset_defined_in_a_function_is_refused(route):
    with refused("which does not lead to it"):
        route(type("Local", (Stock,), {}))
    safe = type("Reading", (viewsets.ViewSet,), {"list": Actions.list})
    route(safe)


def test_a_call_without_drfs_request_is_an_error(alice, route, caplog):
    route(Raw)
    assert alice.post("/stock/raw/", key="k").status_code == 201
    assert alice.request("PUT", "/stock/1/", key="k").status_code == 500
    assert "was called without the request of Django REST framework" in caplog.text
    assert records()[0][0] == "completed"


def test_the_audit_and_the_middleware_detect_a_routers_protection(alice, route, middleware, monkeypatch):
    route(Mixed)
    found = {(each.method, each.route): (str(each.verdict), each.operation.name) for each in audit().routes}
    assert found["POST", "/stock/pay/"] == ("protected", f"{__name__}.Mixed.pay")
    monkeypatch.setattr(Denied, "allowed", False)
    assert alice.post("/stock/pay/", key="k")["Idempotency-Status"] != "ignored"
