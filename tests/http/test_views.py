"""The same promises on every kind of view, and what becomes of a decorator in the wrong place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework import serializers, viewsets
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import PARK, Operation, current_claim, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.views import KINDS, DecoratedModelViewSet, UndecoratedView, drf_answer, plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.scenario(8)
@pytest.mark.usefixtures("urls")
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_returns_status_headers_and_bytes(alice: Caller, kind: str, transport: str) -> None:
    alice.transport = transport
    url = f"/kinds/{kind}/"
    first = alice.post(url, {"amount": 1}, key="k")
    assert first.status_code == 201
    assert "Idempotency-Replayed" not in first
    assert effects() == 1
    for _ in range(2):
        replay = alice.post(url, {"amount": 1}, key="k")
        assert replay["Idempotency-Replayed"] == "true"
        assert (replay.status_code, replay.content) == (first.status_code, first.content)
        for header in ("Content-Type", "Location", "Idempotency-Key"):
            assert replay[header] == first[header]
    assert effects() == 1  # a handler that ran has left a row
    record = IdempotencyRecord.objects.get()
    assert alice.user is not None
    assert (record.account_id, record.operation, record.idempotency_key) == (str(alice.user.pk), KINDS[kind][1], "k")
    assert (record.status, record.attempt, record.response_status) == ("completed", 1, 201)
    assert record.completed_at is not None
    assert record.lease_expires_at is None


@pytest.mark.scenario(20)
@pytest.mark.usefixtures("urls")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_view_is_protected(alice: Caller, kind: str) -> None:
    url = f"/kinds/{kind}/"
    assert problem_code(alice.post(url)) == "idempotency_key_missing"
    assert problem_code(alice.post(url, key="a,b")) == "idempotency_key_invalid"
    assert effects() == 0
    # A crash undoes what the handler wrote, and the retry runs.
    assert alice.post(f"{url}?crash=1", key="crash").status_code == 500
    assert effects() == 0
    assert IdempotencyRecord.objects.get(idempotency_key="crash").status == "recoverable"
    assert alice.post(f"{url}?status=503", key="busy").status_code == 503
    assert effects() == 0
    first = alice.post(url, {"amount": 1}, key="k")
    assert json.loads(first.content)["in_transaction"]
    assert json.loads(first.content)["operation"] == KINDS[kind][1]
    assert problem_code(alice.post(url, {"amount": 2}, key="k")) == "idempotency_key_reused"
    assert effects() == 1
    # Other methods of the same view are not.
    got = alice.get(url, key="k")
    assert got.status_code == 201
    assert json.loads(got.content)["operation"] is None
    assert effects() == 2
    assert current_claim() is None


@pytest.mark.scenario(20)
def test_an_action_is_protected_whichever_decorator_stands_above(alice: Caller, settings: Any) -> None:
    class ViewSet(viewsets.GenericViewSet[Any]):
        queryset = Transfer.objects.none()

        @action(detail=True, methods=["post"])
        @idempotent("tests.below")
        def below(self, request: Request, pk: str) -> Response:
            return drf_answer(request)

        @idempotent("tests.above")
        @action(detail=True, methods=["post"])
        def above(self, request: Request, pk: str) -> Response:
            return drf_answer(request)

    router = SimpleRouter()
    router.register("transfers", ViewSet)
    settings.ROOT_URLCONF = (path("", include(router.urls)),)
    for name in ("below", "above"):
        url = f"/transfers/1/{name}/"
        assert alice.post(url, key="k").content == alice.post(url, key="k").content
    assert effects() == 2
    assert set(IdempotencyRecord.objects.values_list("operation", flat=True)) == {"tests.below", "tests.above"}


@pytest.mark.scenario(20)
def test_a_decorated_method_called_by_a_decorated_override_is_one_operation(alice: Caller, serve: Serve) -> None:
    class ViewSet(DecoratedModelViewSet):
        @idempotent("kinds.model_viewset")
        def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
            return super().create(request, *args, **kwargs)

    serve(ViewSet.as_view({"post": "create"}))
    assert alice.post(key="k").content == alice.post(key="k").content
    assert effects() == 1
    assert IdempotencyRecord.objects.count() == 1


@pytest.mark.scenario(20)
def test_a_decorator_under_others_still_protects(alice: Caller, serve: Serve) -> None:
    class Wrapped(View):
        @method_decorator(never_cache)
        @idempotent("tests.wrapped")
        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    class Decorated(View):
        @method_decorator(idempotent("tests.method_decorator"))
        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    serve(Wrapped.as_view(), **{"decorated/": Decorated.as_view()})
    for url in ("/", "/decorated/"):
        assert alice.post(url, key="k").content == alice.post(url, key="k").content
    assert effects() == 2


@pytest.mark.scenario(20)
def test_an_operation_declared_elsewhere_is_taken_by_decorator_and_mixin(alice: Caller, serve: Serve) -> None:
    declared = Operation("tests.declared", required=False)

    class Mixed(IdempotentMixin, APIView):
        idempotent_operations: ClassVar = {"post": declared}

        def post(self, request: Request) -> Response:
            return drf_answer(request)

    serve(idempotent(declared)(plain_answer), **{"mixin/": Mixed.as_view()})
    for url in ("/", "/mixin/"):
        assert alice.post(url).status_code == 201
    first = alice.post("/", key="k")
    assert alice.post("/", key="k").content == first.content
    assert effects() == 3


# Failure mode 35: a decorator that would protect nothing


class PlainAPIView(APIView):
    def post(self, request: Request) -> Response:
        return drf_answer(request)


@api_view(["POST"])
def drf_function(request: Request) -> Response:
    return drf_answer(request)


@pytest.mark.failure_mode(35)
@pytest.mark.parametrize(
    "unprotectable",
    [
        UndecoratedView,
        PlainAPIView,
        PlainAPIView.as_view(),
        drf_function,
        staticmethod(plain_answer),
        classmethod(plain_answer),
        property(plain_answer),
        "view",
        None,
    ],
    ids=[
        "view class",
        "APIView",
        "as_view() of DRF",
        "api_view",
        "staticmethod",
        "classmethod",
        "property",
        "str",
        "None",
    ],
)
def test_a_decorator_that_could_not_protect_is_refused_when_applied(unprotectable: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"@idempotent\('tests.refused'\)"):
        idempotent("tests.refused")(unprotectable)


@pytest.mark.failure_mode(35)
def test_a_mixin_that_names_no_handler_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(ImproperlyConfigured, match="has no such handler"):

        class Misspelt(IdempotentMixin, viewsets.ViewSet):
            idempotent_operations: ClassVar = {"creat": "tests.misspelt"}


@pytest.mark.failure_mode(35)
@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3)])
def test_a_call_without_a_request_says_so(arguments: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"@idempotent\('tests.helper'\) expects a request"):
        idempotent("tests.helper")(lambda *arguments: None)(*arguments)


@pytest.mark.failure_mode(35)
def test_one_name_with_two_policies_is_refused() -> None:
    idempotent("tests.twice")(plain_answer)
    with pytest.raises(ImproperlyConfigured, match="declared already with another policy"):
        idempotent("tests.twice", required=False)
    with pytest.raises(ImproperlyConfigured, match="has its own policy"):
        idempotent(Operation("tests.twice"), required=False)


# Failure mode 36: one protected view inside another


@pytest.mark.failure_mode(36)
def test_a_protected_view_inside_another_has_a_scope_of_its_own(alice: Caller, serve: Serve) -> None:
    seen: list[str] = []

    def note() -> None:
        claim = current_claim()
        assert claim is not None
        seen.append(claim.operation.name)

    @idempotent("tests.inner")
    def inner(request: HttpRequest) -> HttpResponse:
        note()
        return plain_answer(request)

    @idempotent("tests.outer", transaction=False, recovery=PARK)
    def outer(request: HttpRequest) -> HttpResponse:
        note()
        answer = inner(request)
        note()
        return JsonResponse({"inner": json.loads(answer.content)["id"]}, status=200)

    serve(outer, **{"inner/": inner})
    first = alice.post(key="k")
    assert seen == ["tests.outer", "tests.inner", "tests.outer"]
    assert first.status_code == 200
    assert alice.post(key="k").content == first.content
    assert seen == ["tests.outer", "tests.inner", "tests.outer"]
    assert effects() == 1
    assert set(IdempotencyRecord.objects.values_list("operation", flat=True)) == {"tests.inner", "tests.outer"}
    assert current_claim() is None


@pytest.mark.failure_mode(36)
def test_a_protected_view_inside_anothers_transaction_is_a_part_of_it(alice: Caller, serve: Serve) -> None:
    inner = idempotent("tests.inner")(plain_answer)

    @idempotent("tests.outer")
    def outer(request: HttpRequest) -> HttpResponse:
        Transfer.objects.create(account_id=request.user.pk, recipient="outer", amount=1)
        return inner(request)

    serve(outer)
    assert alice.post("/?crash=1", key="crash").status_code == 500
    assert effects() == 0
    first = alice.post(key="k")
    assert json.loads(first.content)["operation"] == "tests.outer"
    assert alice.post(key="k").content == first.content
    assert effects() == 2
    assert set(IdempotencyRecord.objects.values_list("operation", flat=True)) == {"tests.outer"}
    assert current_claim() is None


@pytest.mark.failure_mode(36)
def test_an_operation_without_a_transaction_inside_anothers_is_a_clear_error(
    alice: Caller, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """To join would break its promise: what it does outside would be done again after a rollback."""
    inner = idempotent("tests.inner", transaction=False, recovery=PARK)(plain_answer)

    @idempotent("tests.outer")
    def outer(request: HttpRequest) -> HttpResponse:
        Transfer.objects.create(account_id=request.user.pk, recipient="outer", amount=1)
        return inner(request)

    serve(outer)
    for _ in range(2):
        assert problem_code(alice.post(key="k")) == "idempotency_outer_transaction"
    assert effects() == 0  # the outer handler passed a 500 on, which is not recorded
    assert "inside an open transaction" in caplog.text
    assert current_claim() is None


class UpdatingViewSet(viewsets.ModelViewSet[Transfer]):
    """DRF's own ``partial_update()`` calls ``update()``."""

    queryset = Transfer.objects.all()

    class serializer_class(serializers.ModelSerializer[Transfer]):  # noqa: N801 - DRF's name
        class Meta:
            model = Transfer
            fields: ClassVar = ["label"]

    def perform_update(self, serializer: Any) -> None:
        super().perform_update(serializer)
        work(self.request)


@pytest.mark.failure_mode(36)
@pytest.mark.parametrize("policy", [{}, {"transaction": False, "recovery": PARK}], ids=["", "no transaction"])
@pytest.mark.parametrize("way", ["decorator", "mixin"])
def test_update_and_partial_update_are_two_operations(
    alice: Caller, serve: Serve, policy: dict[str, Any], way: str
) -> None:
    operations = {name: Operation(f"tests.{name}", **policy) for name in ("update", "partial_update")}
    body: dict[str, Any] = {"idempotent_operations": operations}
    bases: tuple[type, ...] = (IdempotentMixin, UpdatingViewSet)
    if way == "decorator":
        bases = (UpdatingViewSet,)
        body = {name: idempotent(each)(getattr(UpdatingViewSet, name)) for name, each in operations.items()}
    view: Any = type("ViewSet", bases, body)
    transfer = Transfer.objects.create(account=alice.user, recipient="carol", amount=1)
    serve(**{"<int:pk>/": view.as_view({"put": "update", "patch": "partial_update"})})
    for count, method in enumerate(("PUT", "PATCH"), start=1):
        answers = [alice.request(method, f"/{transfer.pk}/", {"label": method}, key=method) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[1]["Idempotency-Replayed"] == "true"
        assert effects() == 1 + count
    transfer.refresh_from_db()
    assert transfer.label == "PATCH"
    recorded = set(IdempotencyRecord.objects.values_list("operation", "idempotency_key"))
    joined = {("tests.update", "PUT"), ("tests.partial_update", "PATCH")}
    assert recorded == (joined | {("tests.update", "PATCH")} if policy else joined)


@pytest.mark.failure_mode(36)
@pytest.mark.parametrize("query", ["", "?crash=1", "?status=500", "?status=404"])
def test_no_claim_outlives_its_request(alice: Caller, serve_operation: Callable[..., None], query: str) -> None:
    serve_operation()
    alice.post(f"/{query}", key="k")
    assert current_claim() is None
    alice.post(f"/{query}", key="k")
    assert current_claim() is None
