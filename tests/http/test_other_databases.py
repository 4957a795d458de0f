"""Records in one database, and another one with ATOMIC_REQUESTS, whose transaction a protected request can't have."""

import json

import pytest
from django.db import connections, transaction
from django.http import HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from idempotency import REEXECUTE, idempotent
from idempotency.views.checks import check_atomic_requests
from idempotency.views.route_audit import audit
from tests.aliases import added
from tests.concurrency.failures import UNAVAILABLE, failing_database, problem
from tests.http.callers import assert_refused, problem_code, records

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_61]

policies = pytest.mark.parametrize(
    "policy", [{}, {"transaction": False, "recovery": REEXECUTE}], ids=["in a transaction", "outside"]
)


@pytest.fixture(autouse=True)
def _other(transactional_db, tmp_path, monkeypatch):
    """Another database, with ATOMIC_REQUESTS and a table of transfers."""
    settings = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(tmp_path / "other.sqlite3"),
        "OPTIONS": {},
        "ATOMIC_REQUESTS": True,
    }
    with added(monkeypatch, "other", settings):
        with connections["other"].cursor() as cursor:
            cursor.execute("CREATE TABLE parent (id integer PRIMARY KEY)")
            # Checked at COMMIT, as Django's own foreign keys are.
            cursor.execute(
                "CREATE TABLE note (id integer PRIMARY KEY, text text, "
                "parent_id integer REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)"
            )
        yield


def write(text, parent=None):
    with connections["other"].cursor() as cursor:
        cursor.execute("INSERT INTO note (text, parent_id) VALUES (%s, %s)", [text, parent])


def notes():
    with connections["other"].cursor() as cursor:
        cursor.execute("SELECT text FROM note ORDER BY id")
        return [text for (text,) in cursor.fetchall()]


def open_on_other():
    return connections["other"].in_atomic_block


def created(request):
    return HttpResponse(status=201)


class Method(View):
    post = idempotent("tests.both_of_class")(lambda self, request: created(request))


REMEDY = "non_atomic_requests(using='other')"


@policies
def test_a_request_that_would_lose_a_transaction_is_refused(alice, serve, policy, caplog):
    """Nothing is claimed, so the remedy needs no other key."""
    view, exempt = (idempotent(f"tests.{name}", **policy)(created) for name in ("both", "exempt"))
    transaction.non_atomic_requests(using="other")(exempt)
    serve(view, **{"class/": Method.as_view(), "exempt/": exempt})
    for url in ("/", "/class/"):
        assert_refused(alice, "idempotency_outer_transaction", url, key="k")
        assert REMEDY in caplog.text
        caplog.clear()
    assert records() == []
    assert alice.post("/exempt/", key="k").status_code == 201


@policies
def test_such_a_view_is_an_error_of_the_checks_and_the_audit(settings, policy, monkeypatch):
    view, exempt = (idempotent(f"tests.{name}", **policy)(created) for name in ("both", "exempt"))
    transaction.non_atomic_requests(using="other")(exempt)
    settings.ROOT_URLCONF = (path("refused/", view), path("class/", Method.as_view()), path("exempt/", exempt))
    found = check_atomic_requests(None)
    assert [(each.id, each.msg.partition(":")[0]) for each in found] == [
        ("idempotency.E031", "/refused/"),
        ("idempotency.E031", "/class/"),
    ]
    assert all(REMEDY in each.msg for each in found)
    verdicts = {route.route: (str(route.verdict), REMEDY in " ".join(route.reasons)) for route in audit().routes}
    broken, protected = ("broken", True), ("protected", False)
    assert verdicts == {"/refused/": broken, "/class/": broken, "/exempt/": protected}
    monkeypatch.setitem(connections["other"].settings_dict, "ATOMIC_REQUESTS", False)
    assert check_atomic_requests(None) == []


@policies
def test_the_records_database_may_be_the_one_with_atomic_requests(settings, policy, alice, serve, monkeypatch):
    monkeypatch.setitem(connections["other"].settings_dict, "ATOMIC_REQUESTS", False)
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    serve(idempotent("tests.both", **policy)(created))
    assert check_atomic_requests(None) == []
    assert alice.post(key="k").status_code == 201


@policies
@pytest.mark.parametrize(
    "leave",
    [lambda: transaction.atomic(using="other").__enter__(), lambda: transaction.set_autocommit(False, using="other")],
    ids=["a block", "autocommit off"],
)
def test_a_transaction_left_open_on_the_other_database_is_an_error(alice, serve, policy, leave, monkeypatch, caplog):
    monkeypatch.setitem(connections["other"].settings_dict, "ATOMIC_REQUESTS", False)
    leaving = [leave]

    @serve
    @idempotent("tests.leaving", **policy)
    def view(request):
        if leaving:
            leaving.pop()()
        write("written")
        return HttpResponse(status=201)

    assert problem_code(alice.post(key="k")) == "idempotency_transaction_broken"
    assert "'other'" in caplog.text
    assert (open_on_other(), notes(), records()) == (False, [], [("recoverable", 1)])
    assert alice.post(key="k").status_code == 201
    assert (open_on_other(), notes()) == (False, ["written"])


@policies
@pytest.mark.usefixtures("atomic_requests")
def test_an_unavailable_records_database_is_a_503_with_atomic_requests(client, settings, policy):
    view = idempotent("tests.gone", account=lambda request: "1", **policy)(created)
    view = transaction.non_atomic_requests(using="other")(view)
    settings.ROOT_URLCONF = (path("", view),)
    with failing_database(connections["default"], "ensure_connection"):
        assert problem(client.post("/", headers={"Idempotency-Key": "k"})) == UNAVAILABLE
    assert records() == []


@policies
def test_a_transaction_that_would_commit_after_the_outcome_is_refused(alice, serve, policy):
    view = idempotent("tests.inner", **policy)(created)
    exempt = transaction.non_atomic_requests(using="other")(lambda request: view(request))
    hand = transaction.atomic(using="other")(view)
    serve(lambda request: view(request), **{"exempt/": exempt, "hand/": hand})
    for url in ("/", "/hand/"):
        assert_refused(alice, "idempotency_outer_transaction", url, key="k")
    assert alice.post("/exempt/", key="k").status_code == 201


@pytest.mark.parametrize("way", ["above", "below", "class", "dispatch"])
def test_an_exempted_handler_has_no_transaction(alice, serve, way):
    def handler(request):
        return JsonResponse({"open": open_on_other()}, status=201)

    class Exempt(View):
        def get(self, request):
            return handler(request)

        post = idempotent("tests.method")(get)

    exempt = transaction.non_atomic_requests(using="other")
    view = {
        "above": lambda: exempt(idempotent("tests.above")(handler)),
        "below": lambda: idempotent("tests.below")(exempt(handler)),
        "class": lambda: exempt(Exempt.as_view()),
        "dispatch": lambda: method_decorator(exempt, name="dispatch")(Exempt).as_view(),
    }[way]()
    serve(view)
    for answer in (alice.post(key="k"), alice.get()):
        assert json.loads(answer.content) == {"open": False}


@pytest.mark.usefixtures("atomic_requests")
def test_an_unprotected_request_has_one_transaction_on_each_database(alice, serve):
    blocks = []

    def handler(request):
        blocks.append([len(connections[using].atomic_blocks) for using in ("default", "other")])
        write(request.method or "")
        if "crash" in request.GET:
            raise ValueError
        return HttpResponse(status=201)

    class Optional(View):
        def get(self, request):
            return handler(request)

        post = idempotent("tests.optional_method", key_required=False)(get)

    serve(idempotent("tests.optional", key_required=False)(handler), **{"class/": Optional.as_view()})
    for url in ("/", "/class/"):
        for method in ("GET", "POST"):
            assert alice.request(method, url).status_code == 201
            assert alice.request(method, f"{url}?crash=1").status_code == 500
    assert blocks == [[1, 1]] * 8
    assert notes() == ["GET", "POST"] * 2
    assert records() == []
