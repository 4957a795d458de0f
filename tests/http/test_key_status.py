"""The owner of a key can query its status. Another account learns nothing."""

import json
from datetime import datetime

import pytest
from django.db.utils import OperationalError
from django.http import HttpResponse

from idempotency import PARK, REEXECUTE, Operation, Reconcile, idempotent
from idempotency.accounts import Fixed
from idempotency.contrib.rest_framework import KeyStatusView as KeyStatusAPIView
from idempotency.http.key_status import KeyStatusView
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.protocol.decisions import retry_after
from tests.http.callers import problem_code, store_refusing
from tests.http.test_cost import LOOK, authentication, statements
from tests.http.views import plain_answer
from tests.operations import redeclare
from tests.records import HOUR, MINUTE, make_records

pytestmark = pytest.mark.django_db(transaction=True)

URL = "/keys/tests.queried/"
UNKNOWN = {"status": "unknown", "response_status": None, "created_at": None, "completed_at": None, "expires_at": None}


@pytest.fixture(params=["plain", "drf"])
def operation(request, serve, middleware):
    """An operation at ``/``, and views that report the status of its keys: named by the URL, or fixed."""
    made = Operation.declare("tests.queried")
    view = (KeyStatusAPIView if request.param == "drf" else KeyStatusView).as_view
    views = {
        "bare/": plain_answer,
        "keys/<str:operation>/": view(),
        "key/": view(operation="tests.queried"),
        "same/": view(operation=made),
        "missing/": view(operation="tests.missing"),
        "keys/": view(),
    }
    serve(idempotent(made)(plain_answer), **views)
    return made


def query(caller, key="k", url=URL):
    answer = caller.get(url, key=key)
    assert (answer.status_code, answer["Cache-Control"], answer["Idempotency-Key"]) == (200, "no-store", key)
    found = json.loads(answer.content)
    assert "Idempotency-Status" not in answer  # the middleware takes the key for this view's own
    assert found.keys() == UNKNOWN.keys()
    assert ("Retry-After" in answer) == (found["status"] == "in_progress")
    return found


@pytest.mark.usefixtures("operation")
def test_the_owner_learns_the_status_of_the_outcome_and_its_times(alice, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    assert query(alice) == UNKNOWN
    alice.post("/?status=402", key="k")
    found = [query(alice, '"k"' if url == "/key/" else "k", url) for url in (URL, "/key/", "/same/")]
    assert found[0] == found[1] == found[2]
    assert (found[0]["status"], found[0]["response_status"]) == ("completed", 402)
    times = {name: datetime.fromisoformat(found[0][name]) for name in ("created_at", "completed_at", "expires_at")}
    assert times == IdempotencyRecord.objects.values(*times).get()
    assert all(found[0][name].endswith("Z") for name in times)


@pytest.mark.parametrize(
    ("recovery", "recorded", "expires", "lease", "status"),
    [
        (REEXECUTE, Status.IN_PROGRESS, HOUR, MINUTE, "in_progress"),
        (PARK, Status.IN_PROGRESS, -HOUR, MINUTE, "in_progress"),  # a live claim may still commit
        (REEXECUTE, Status.IN_PROGRESS, HOUR, -MINUTE, "recoverable"),
        (Reconcile(print), Status.IN_PROGRESS, HOUR, -MINUTE, "recoverable"),
        (PARK, Status.IN_PROGRESS, HOUR, -MINUTE, "parked"),
        (REEXECUTE, Status.RECOVERABLE, HOUR, None, "recoverable"),
        (REEXECUTE, Status.PARKED, HOUR, None, "parked"),
        (REEXECUTE, Status.COMPLETED, HOUR, None, "completed"),
        (REEXECUTE, Status.COMPLETED, -HOUR, None, "unknown"),
    ],
)
def test_the_status_predicts_the_answer_to_a_retry(
    alice, operation, recovery, recorded, expires, lease, status, monkeypatch
):
    redeclare(monkeypatch, operation.name, recovery=Operation.declare("tests.recovering", recovery=recovery).recovery)
    of = {"account_id": str(alice.user.pk), "operation": operation.name, "idempotency_key": "k"}
    make_records(1, recorded, expires=expires, lease=lease, **of)
    before = list(IdempotencyRecord.objects.values())
    found = query(alice)
    is_completed = status == "completed"
    assert (found["status"], found["response_status"]) == (status, 201 if is_completed else None)
    assert (found["completed_at"] is not None) == is_completed
    assert (found["created_at"] is None) == (found["expires_at"] is None) == (status == "unknown")
    assert list(IdempotencyRecord.objects.values()) == before


@pytest.mark.usefixtures("operation")
def test_a_status_costs_one_query_and_others_keys_are_unknown(alice, bob):
    before = authentication(alice)
    alice.post(key="k")
    for caller in (alice, bob):  # the owner of the key, and another account
        with statements() as made:
            query(caller)
        assert made == [*before, *LOOK]
    Operation.declare("tests.other")
    assert query(bob) == query(bob, "unused") == query(alice, url="/keys/tests.other/") == UNKNOWN


@pytest.mark.usefixtures("operation")
@pytest.mark.parametrize("url", [URL, "/keys/"], ids=["a status", "the list"])
def test_an_unanswerable_query_is_refused(alice, anonymous, settings, url):
    assert problem_code(alice.get(url)) == "idempotency_key_missing"
    refused = alice.get(url, key="a,b")
    assert (problem_code(refused), refused["Cache-Control"]) == ("idempotency_key_invalid", "no-store")
    assert anonymous.get(url, key="k").status_code == 401
    assert alice.get("/keys/tests.nothing/", key="k").status_code == 404
    assert alice.get("/missing/", key="k").status_code == 500
    assert alice.post(url, key="k").status_code == 405
    settings.IDEMPOTENCY = {"ACCOUNT": lambda request: None}
    assert problem_code(alice.get(url, key="k")) == "idempotency_account_required"
    settings.IDEMPOTENCY = {"ERROR_RESPONSE": lambda request, error: HttpResponse(f"{request.path} {error.code}")}
    assert alice.get(url).content == f"{url} idempotency_key_missing".encode()


@pytest.mark.usefixtures("operation")
def test_an_unreadable_record_or_one_of_a_newer_release_is_a_503(alice, caplog):
    with store_refusing("SELECT", OperationalError("gone")):
        assert problem_code(alice.get(URL, key="k")) == "idempotency_unavailable"
    assert "Operation 'tests.queried' answered 503 (idempotency_unavailable)" in caplog.text
    alice.post(key="k")
    IdempotencyRecord.objects.update(status="sealed")
    answer = alice.get(URL, key="k")
    assert (problem_code(answer), answer["Retry-After"]) == ("idempotency_unavailable", "1")


def test_retry_after_equals_the_wait_of_a_duplicate(alice, operation):
    of = {"account_id": str(alice.user.pk), "operation": operation.name, "idempotency_key": "k"}
    make_records(1, Status.IN_PROGRESS, lease=MINUTE, **of)
    queried, retried = alice.get(URL, key="k"), alice.post(key="k")
    assert (retried.status_code, queried["Retry-After"]) == (409, retried["Retry-After"])
    lease = operation.policy.lease.total_seconds()
    assert [retry_after(lease - age, operation.policy) for age in (0, 3)] == [1, 3]


def listed(caller, key="k", url="/keys/"):
    answer = caller.get(url, key=key)
    assert (answer.status_code, answer["Cache-Control"], answer["Idempotency-Key"]) == (200, "no-store", key)
    document = answer.json()
    assert document.keys() == {"keys"}
    assert all(found.keys() == UNKNOWN.keys() | {"operation"} for found in document["keys"])
    return [(found["operation"], found["status"]) for found in document["keys"]]


@pytest.fixture
def others():
    """Other declared operations: two for requests, one for all callers, and one without a view."""
    for name, policy in {"second": {}, "third": {}, "of_all": {"account": Fixed("1")}}.items():
        idempotent(f"tests.{name}", **policy)(lambda request: None)
    Operation.declare("tests.within")
    return [f"tests.{name}" for name in ("second", "third", "of_all", "within")]


def test_without_an_operation_the_callers_records_of_the_key_are_listed(alice, bob, operation, others):
    assert listed(alice) == []
    alice.post("/?status=402", key="k")
    alice.post(key="another")
    for number, name in enumerate((*others, "tests.gone")):
        of = {"account_id": str(alice.user.pk), "operation": name, "idempotency_key": "k"}
        make_records(1, Status.PARKED if number else Status.COMPLETED, expires=HOUR, **of)
    assert listed(alice) == [(operation.name, "completed"), (others[0], "completed"), (others[1], "parked")]
    assert listed(bob) == listed(alice, "unused") == []
    (found,) = alice.get("/keys/", key="another").json()["keys"]
    assert found == {"operation": operation.name, **alice.get(URL, key="another").json()}


@pytest.mark.usefixtures("operation", "others")
def test_the_list_costs_one_query_and_has_the_shortest_wait(alice):
    before = authentication(alice)
    for name, lease in (("tests.queried", 4 * MINUTE), ("tests.second", MINUTE), ("tests.third", -MINUTE)):
        of = {"account_id": str(alice.user.pk), "operation": name, "idempotency_key": "k"}
        make_records(1, Status.IN_PROGRESS, lease=lease, **of)
    with statements() as made:
        answer = alice.get("/keys/", key="k")
    assert made == [*before, *LOOK]
    waits = [alice.get(f"/keys/tests.{name}/", key="k").get("Retry-After") for name in ("queried", "second", "third")]
    assert waits[2] is None
    assert answer["Retry-After"] == min(waits[:2], key=int)
