"""Records in one database, and a handler's writes in another one with ATOMIC_REQUESTS."""

import json
from contextlib import suppress
from unittest.mock import Mock

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, OperationalError, connections, transaction
from django.http import Http404, HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.exceptions import ValidationError
from rest_framework.generics import GenericAPIView
from rest_framework.response import Response
from rest_framework.views import exception_handler

from idempotency import PARK, REEXECUTE, Reconcile, Unknown, idempotent
from idempotency.protocol import ownership
from testproject.models import Transfer
from tests.aliases import added
from tests.concurrency.failures import UNAVAILABLE, failing_database, just_before, problem
from tests.http.callers import assert_refused, effects, problem_code, records
from tests.http.serving import drf_view

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


def ending(status=201, *, undone=(), error=None):
    """Make an end for a handler: mark the ``undone`` transactions for rollback, then raise or respond."""

    def end(request):
        for using in undone:
            if connections[using].in_atomic_block:
                transaction.set_rollback(True, using=using)
        if error is not None:
            raise error
        return HttpResponse(status=status)

    return end


CREATED = ending()


def serve_writing(serve, end=CREATED, **policy):
    """Serve an operation that writes to both databases and then calls ``end``."""

    @serve
    @idempotent("tests.both", **policy)
    def view(request):
        assert open_on_other()
        Transfer.objects.create(account_id=request.user.pk, recipient="carol", amount=1)
        write("written")
        return end(request)


@policies
def test_the_other_database_commits_first(alice, serve, policy):
    seen = []
    serve_writing(serve, **policy)
    with just_before(ownership, "complete", lambda *_, **options: seen.append((open_on_other(), notes()))):
        assert alice.post(key="k").status_code == 201
    assert seen == [(False, ["written"])]
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert notes() == ["written"]


@policies
def test_an_effect_refused_at_commit_is_not_recorded(alice, serve, policy):
    parents = [7, None]

    def end(request):
        write("child", parents.pop(0))
        return HttpResponse(status=201)

    serve_writing(serve, end, **policy)
    assert alice.post(key="k").status_code == 500  # like the unprotected view
    assert notes() == []
    assert records() == [("recoverable", 1)]
    assert alice.post(key="k").status_code == 201
    assert notes() == ["written", "child"]
    assert effects() == (1 if not policy else 2)


@policies
@pytest.mark.parametrize(
    ("end", "status", "record", "kept"),
    [
        (ending(error=ValueError()), 500, "recoverable", []),
        (ending(error=Http404()), 404, "completed", []),
        (ending(400, undone=("default", "other")), 400, "completed", []),
        (ending(400), 400, "completed", ["written"]),
        (ending(503), 503, "recoverable", []),  # the retry runs, so none of these writes may be kept
    ],
    ids=["crash", "Http404", "400, undone", "400", "503"],
)
def test_the_other_database_keeps_what_django_would_keep(alice, serve, policy, end, status, record, kept):
    serve_writing(serve, end, **policy)
    assert alice.post(key="k").status_code == status
    assert (notes(), records()) == (kept, [(record, 1)])


@pytest.mark.parametrize("handled", [False, True], ids=["raised", "handled"])
def test_drf_rolls_the_other_database_back(alice, serve, handled):
    def handler(request):
        write("written")
        if handled:
            return exception_handler(ValidationError(), {})
        raise ValidationError

    serve(drf_view(idempotent("tests.drf")(handler)))
    assert alice.post(key="k").status_code == 400
    assert notes() == []
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"


@transaction.atomic(using="other", savepoint=False)  # as in save() and bulk_create()
def fail_to_save():
    raise IntegrityError


def swallow_an_error(request):
    with suppress(IntegrityError):
        fail_to_save()
    return HttpResponse()


@policies
@pytest.mark.parametrize("by", ["a mark", "the database"])
def test_a_broken_transaction_is_a_crash(alice, serve, policy, by, monkeypatch):
    if by == "the database":  # which reports no error at COMMIT
        monkeypatch.setattr(connections["other"], "is_usable", lambda: False)
    serve_writing(serve, swallow_an_error if by == "a mark" else CREATED, **policy)
    assert problem_code(alice.post(key="k")) == "idempotency_transaction_broken"
    assert (notes(), records()) == ([], [("recoverable", 1)])


@policies
@pytest.mark.parametrize("undone", [("other",), ("default",), ("default", "other")], ids=" and ".join)
def test_a_success_that_rolls_back_a_transaction_is_not_recorded(alice, serve, policy, undone):
    if "transaction" in policy:
        undone = ("other",)  # the only open transaction
    serve_writing(serve, ending(undone=undone), **policy)
    for attempt in (1, 2):
        answer = alice.post(key="k")
        assert (answer.status_code, answer["Idempotency-Status"]) == (201, "not-recorded")
        assert (notes(), records()) == ([], [("recoverable", attempt)])
    assert effects() == (2 if "transaction" in policy else 0)


@policies
@pytest.mark.parametrize("atomic", [True, False], ids=["ATOMIC_REQUESTS", "in autocommit"])
def test_a_transaction_left_open_on_the_other_database_is_an_error(alice, serve, policy, atomic, monkeypatch, caplog):
    monkeypatch.setitem(connections["other"].settings_dict, "ATOMIC_REQUESTS", atomic)
    leaving = [transaction.atomic(using="other").__enter__]

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
def test_autocommit_left_off_on_the_other_database_is_an_error(alice, serve, policy, monkeypatch):
    monkeypatch.setitem(connections["other"].settings_dict, "ATOMIC_REQUESTS", False)
    leaving = [False]

    @serve
    @idempotent("tests.leaving", **policy)
    def view(request):
        if leaving:
            transaction.set_autocommit(leaving.pop(), using="other")
        write("written")
        return HttpResponse(status=201)

    assert problem_code(alice.post(key="k")) == "idempotency_transaction_broken"
    assert (notes(), records()) == ([], [("recoverable", 1)])
    assert alice.post(key="k").status_code == 201
    assert notes() == ["written"]


def test_nothing_is_claimed_if_the_other_database_is_unavailable(alice, serve, monkeypatch):
    monkeypatch.setattr(connections["other"], "ensure_connection", Mock(side_effect=OperationalError))
    serve_writing(serve, transaction=False, recovery=PARK)
    assert alice.post(key="k").status_code == 500
    assert records() == []


@policies
@pytest.mark.usefixtures("atomic_requests")
def test_an_unavailable_records_database_is_a_503_with_atomic_requests(client, settings, policy):
    view = idempotent("tests.gone", account=lambda request: "1", **policy)(ending())
    settings.ROOT_URLCONF = (path("", view),)
    with failing_database(connections["default"], "ensure_connection"):
        assert problem(client.post("/", headers={"Idempotency-Key": "k"})) == UNAVAILABLE
    assert records() == []


@policies
def test_a_transaction_that_would_commit_after_the_outcome_is_refused(alice, serve, policy):
    view = idempotent("tests.inner", **policy)(ending())
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


def test_an_async_views_transactions_commit_before_its_outcome(alice, serve):
    @serve
    @idempotent("tests.async")
    async def view(request):
        assert await sync_to_async(open_on_other)()
        await sync_to_async(write)("written")
        return HttpResponse(status=503 if "busy" in request.GET else 201)

    assert alice.post("/?busy=1", key="busy").status_code == 503
    assert notes() == []
    assert alice.post(key="k").status_code == 201
    assert notes() == ["written"]


@pytest.mark.parametrize(
    ("recovery", "left", "again"),
    [
        (PARK, "parked", "idempotency_outcome_unknown"),
        (Reconcile(lambda record: Unknown()), "in_progress", "idempotency_in_progress"),
    ],
    ids=["park", "reconcile"],
)
def test_a_run_committed_on_the_other_database_is_not_repeated(alice, serve, recovery, left, again):
    serve_writing(serve, recovery=recovery)
    with failing_database(ownership, "complete"):
        assert problem_code(alice.post(key="k")) == "idempotency_unavailable"
    assert (notes(), effects(), records()) == (["written"], 0, [(left, 1)])
    assert problem_code(alice.post(key="k")) == again
    assert notes() == ["written"]


def test_the_writes_of_a_check_before_a_replay_are_rolled_back(alice, serve):
    class Looking(GenericAPIView):
        def get_object(self):
            write("looked")
            Transfer.objects.create(account=self.request.user, recipient="carol", amount=1)

        @idempotent("tests.looking")
        def post(self, request, pk):
            return Response(self.get_object())

    serve(**{"<int:pk>/": Looking.as_view()})
    for replay in ("", "true"):
        assert alice.post("/1/", key="k").get("Idempotency-Replayed", "") == replay
        assert (notes(), effects()) == (["looked"], 1)
