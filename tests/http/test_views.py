"""Every kind of view keeps the same promises, and a misplaced decorator is refused."""

import json

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import JsonResponse
from rest_framework import viewsets
from rest_framework.decorators import api_view
from rest_framework.views import APIView

from idempotency import Operation, current_claim, idempotent, require_claim
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import assert_nothing_kept, assert_refused, problem_code, replayed
from tests.http.serving import OUTSIDE, WAYS, policies, protecting
from tests.http.views import KINDS, LabelSerializer, Methods, PlainView, drf_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.http.views")]


@pytest.mark.scenario_2
@pytest.mark.scenario_8
@pytest.mark.scenario_20
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["wsgi", "asgi", "ATOMIC_REQUESTS"])
def test_every_kind_of_view_runs_once_replays_and_refuses_another_payload(alice, kind, way, request):
    if way == "ATOMIC_REQUESTS":
        request.getfixturevalue("atomic_requests")
    alice.transport = "asgi" if way == "asgi" else "wsgi"
    url = f"/kinds/{kind}/"
    first, replay = replayed(alice, url, {"amount": 1})
    assert first.status_code == 201
    for header in ("Content-Type", "Location", "Idempotency-Key"):
        assert replay[header] == first[header]
    answer = json.loads(first.content)
    assert (answer["operation"], answer["in_transaction"]) == (KINDS[kind][1], True)
    record = IdempotencyRecord.objects.get()
    assert (record.account_id, record.operation, record.idempotency_key) == (str(alice.user.pk), KINDS[kind][1], "k")
    assert (record.status, record.attempt, record.response_status) == ("completed", 1, 201)
    assert (record.completed_at is None, record.lease_expires_at) == (False, None)
    refused = assert_refused(alice, "idempotency_key_reused", url, {"amount": 2}, key="k")
    assert not {"Retry-After", "Location"} & refused.headers.keys()
    # The refusal has changed nothing: the first payload still replays.
    assert alice.post(url, {"amount": 1}, key="k").content == first.content


@pytest.mark.scenario_20
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_view_keeps_an_outcome_of_a_failure(alice, kind, atomic):
    url = f"/kinds/{kind}/"
    assert_refused(alice, "idempotency_key_missing", url)
    assert_refused(alice, "idempotency_key_invalid", url, key="a,b")
    assert_nothing_kept(alice, 500, f"{url}?crash=1")
    assert current_claim() is None
    IdempotencyRecord.objects.all().delete()
    assert_nothing_kept(alice, 503, f"{url}?status=503")


PLAIN_API_VIEW = type("PlainAPIView", (Methods, APIView), {})


@pytest.mark.failure_35
@pytest.mark.parametrize(
    "unprotectable",
    [
        *[PlainView, PLAIN_API_VIEW, PLAIN_API_VIEW.as_view(), api_view(["POST"])(drf_answer)],
        *[staticmethod(plain_answer), classmethod(plain_answer), property(plain_answer), "view", None],
    ],
    ids=["class", "APIView", "as_view()", "api_view", "staticmethod", "classmethod", "property", "text", "None"],
)
def test_a_decorator_that_could_not_protect_is_refused_when_applied(unprotectable):
    with pytest.raises(ImproperlyConfigured, match=r"@idempotent\('tests.refused'\)"):
        idempotent("tests.refused")(unprotectable)


@pytest.mark.failure_35
@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3)])
def test_a_call_without_a_request_names_the_mistake(arguments):
    with pytest.raises(TypeError, match=rf"@idempotent\('tests.helper'\) expects a request as the .* of {__name__}\."):
        idempotent("tests.helper")(lambda *arguments: None)(*arguments)


def outer(operation, inner, **policy):
    @idempotent(operation, **policy)
    def view(request):
        work(request)
        answer = inner(request)
        assert require_claim().operation.name == operation
        return answer

    return view


@pytest.mark.failure_36
@pytest.mark.parametrize(
    ("policy", "inner_operation", "recorded"),
    [({}, "tests.outer", {"tests.outer"}), (OUTSIDE, "tests.inner", {"tests.inner", "tests.outer"})],
    ids=["inside its transaction", "outside of one"],
)
def test_a_view_inside_another_joins_its_transaction_or_claims_separately(
    alice, serve, policy, inner_operation, recorded
):
    serve(outer("tests.outer", idempotent("tests.inner")(plain_answer), **policy))
    first, _ = replayed(alice, wrote=2)
    assert json.loads(first.content)["operation"] == inner_operation
    assert set(IdempotencyRecord.objects.values_list("operation", flat=True)) == recorded
    assert current_claim() is None


@pytest.mark.failure_36
def test_an_outside_effect_inside_a_transaction_is_an_error(alice, serve, caplog):
    """Joining would break its promise: its outside effect would be repeated after a rollback."""
    serve(outer("tests.outer", idempotent("tests.inner", **OUTSIDE)(plain_answer)))
    refused = assert_nothing_kept(alice, 500)  # the outer handler passed on the 500, which is not recorded
    assert problem_code(refused) == "idempotency_outer_transaction"
    assert "inside an open transaction" in caplog.text


class Updating(viewsets.ModelViewSet):
    """DRF's ``partial_update()`` calls ``update()``."""

    queryset = Transfer.objects.all()
    serializer_class = LabelSerializer

    def perform_update(self, serializer):
        super().perform_update(serializer)
        work(self.request)


@pytest.mark.failure_36
@policies
@pytest.mark.parametrize("way", WAYS)
def test_update_and_partial_update_are_two_operations(alice, serve, policy, way):
    operations = {name: Operation.declare(f"tests.{name}", **policy) for name in ("update", "partial_update")}
    view = protecting(way, Updating, operations)
    transfer = Transfer.objects.create(account=alice.user, recipient="carol", amount=1)
    serve(**{"<int:pk>/": view.as_view({"put": "update", "patch": "partial_update"})})
    for method in ("PUT", "PATCH"):
        replayed(alice, f"/{transfer.pk}/", {"label": method}, method=method, key=method)
        transfer.refresh_from_db()
        assert transfer.label == method
    recorded = set(IdempotencyRecord.objects.values_list("operation", "idempotency_key"))
    joined = {("tests.update", "PUT"), ("tests.partial_update", "PATCH")}
    assert recorded == (joined | {("tests.update", "PATCH")} if policy else joined)


def test_a_handler_gets_its_claim_from_require_claim(alice, serve):
    serve(idempotent("tests.claim")(lambda request: JsonResponse({"attempt": require_claim().attempt})))
    assert alice.post(key="k").json() == {"attempt": 1}
    with pytest.raises(RuntimeError, match=r"require_claim\(\) was called outside of a protected operation"):
        require_claim()
