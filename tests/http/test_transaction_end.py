"""How a run's transaction ends, and how one that is already open is handled: ATOMIC_REQUESTS and ``atomic()``."""

import functools
import json
from contextlib import ExitStack, suppress

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection, transaction
from django.db.transaction import Atomic
from django.http import Http404, HttpResponse
from django.views import View
from rest_framework import exceptions
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.views import set_rollback

from idempotency import idempotent
from idempotency.http.key_sources import FromHeader
from idempotency.models import IdempotencyRecord
from idempotency.store import Store, store_for
from testproject.models import Transfer
from tests.http.callers import assert_nothing_kept, assert_refused, effects, problem_code, records, replayed
from tests.http.serving import OUTSIDE, part_of, policies
from tests.http.views import KINDS, AsyncMethodView, HiddenView, async_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.http.views")]


def serve_ending(serve, end):
    """Serve an operation that takes effect, then calls ``end`` and swallows its error."""

    @serve
    @idempotent("tests.ending")
    def view(request):
        answer = plain_answer(request)
        with suppress(Exception):
            end()
        return answer


@transaction.atomic(savepoint=False)  # as many of Django's own methods do
def fail_without_a_savepoint():
    raise IntegrityError


@pytest.mark.failure_24
@pytest.mark.failure_25
@pytest.mark.parametrize("first", [False, True], ids=["", "undone and redone"])
def test_a_handler_that_broke_its_transaction_fails(alice, serve, first, caplog):
    def end():
        if first:
            with transaction.atomic():
                transaction.set_rollback(True)  # of its savepoint only
            transaction.set_rollback(True)
            transaction.set_rollback(False)
        fail_without_a_savepoint()

    serve_ending(serve, end)
    assert problem_code(assert_nothing_kept(alice, 500)) == "idempotency_transaction_broken"
    assert "atomic()" in caplog.text
    assert "tests.ending" in caplog.text
    # A failure whose writes were rolled back is accurate, so it is recorded. A transient failure never is.
    replayed(alice, "/?status=409", key="k2", wrote=0)
    assert alice.post("/?status=503", key="k3").status_code == 503
    assert effects() == 0


@pytest.mark.django_db  # the transaction around a test, in which both handlers run
def test_a_rollback_after_a_nested_operation_is_detected(alice, serve):
    inner = idempotent("tests.inner", **OUTSIDE)(plain_answer)

    @serve
    @idempotent("tests.outer", **OUTSIDE)
    def outer(request):
        answer = inner(part_of(request))
        transaction.set_rollback(True)
        connection.needs_rollback = False  # so that the outer record can be written
        return answer

    assert alice.post(key="k").status_code == 201
    assert dict(IdempotencyRecord.objects.values_list("operation", "status")) == {
        "tests.inner": "completed",
        "tests.outer": "parked",
    }


@pytest.mark.failure_24
@pytest.mark.postgres
@pytest.mark.parametrize("status", [200, 400])
def test_a_swallowed_error_that_aborted_the_postgresql_transaction_fails(alice, serve, status):
    serve_ending(serve, lambda: connection.cursor().execute("SELECT 1 / 0"))
    assert problem_code(assert_nothing_kept(alice, 500, f"/?status={status}")) == "idempotency_transaction_broken"


@pytest.mark.failure_24
def test_a_savepoint_keeps_an_error_from_breaking_the_transaction(alice, serve):
    serve_ending(serve, transaction.atomic(lambda: connection.cursor().execute("SELECT * FROM no_such_table")))
    first, _ = replayed(alice)
    assert first.status_code == 201


class RetryingAtomic(Atomic):
    """A block that would retry its transaction after a serialization failure, as django-pgtransaction's."""

    def __enter__(self):
        if transaction.get_connection().in_atomic_block:
            raise RuntimeError("Retries are not permitted within a nested atomic transaction")
        super().__enter__()


def execute(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


def enter_and_write(*blocks):
    with ExitStack() as entered:
        for block in blocks:
            entered.enter_context(block)
        Transfer.objects.update(amount=7)


def set_level():
    with transaction.atomic():
        execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")


MISPLACED = {
    "a durable block": lambda: enter_and_write(transaction.atomic(durable=True)),
    "a durable block in a block": lambda: enter_and_write(transaction.atomic(), transaction.atomic(durable=True)),
    "a block that retries": lambda: enter_and_write(RetryingAtomic(None, True, False)),
    **{
        name: pytest.param(call, marks=pytest.mark.postgres)
        for name, call in {
            "a level in a block": set_level,
            "a statement outside of transactions": lambda: execute("VACUUM auth_user"),
            "a read-only transaction": lambda: execute("SET TRANSACTION READ ONLY"),
        }.items()
    },
}


@pytest.mark.failure_24
@pytest.mark.parametrize("misplaced", MISPLACED.values(), ids=MISPLACED)
def test_what_needs_another_transaction_is_refused_with_the_remedy(alice, serve, misplaced, caplog):
    @serve
    @idempotent("tests.misplaced")
    def view(request):
        misplaced()
        return HttpResponse(status=201)

    answer = assert_nothing_kept(alice, 500)
    assert problem_code(answer) == "idempotency_transaction_broken"
    assert "Retry-After" not in answer
    assert "tests.misplaced" in caplog.text
    assert "transaction=False" in caplog.text


@pytest.mark.parametrize("call", [MISPLACED["a durable block"], MISPLACED["a block that retries"]])
def test_a_block_that_does_not_nest_is_allowed_outside_of_transactions(alice, serve, call):
    @serve
    @idempotent("tests.placed", **OUTSIDE)
    def view(request):
        call()
        return plain_answer(request)

    replayed(alice)


def raise_in_a_block():
    with transaction.atomic():
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("call", [raise_in_a_block, lambda: int("a")])
def test_another_error_is_the_handlers_own(alice, serve, call):
    @serve
    @idempotent("tests.fails")
    def view(request):
        call()

    answer = assert_nothing_kept(alice, 500)
    assert "problem" not in answer["Content-Type"]


@pytest.mark.failure_25
def test_drf_failures_are_recorded_whether_raised_or_returned(alice, serve, atomic):
    @serve
    @transaction.non_atomic_requests
    @api_view(["POST"])
    @idempotent("tests.raise_or_return")
    def view(request):
        answer, _ = work(request)
        if request.data["how"] == "raise":
            raise exceptions.ValidationError(answer)
        if request.data["how"] == "undo":
            transaction.set_rollback(True)
        if request.data["how"] == "undo-as-drf":
            set_rollback()
        return Response(answer, status=400)

    # DRF's set_rollback() acts only under ATOMIC_REQUESTS.
    for how, wrote in {"raise": 0, "undo": 0, "undo-as-drf": 0 if atomic else 1, "return": 1}.items():
        first, _ = replayed(alice, data={"how": how}, key=how, wrote=wrote)
        assert first.status_code == 400


ASYNC = ("async_function", "async_method")
#: Django refuses async views with ATOMIC_REQUESTS, and a function below @api_view must be exempt from it.
WITHOUT_ATOMIC_REQUESTS = (*ASYNC, "api_view")


@pytest.mark.scenario_20
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_passed_through_keeps_its_transaction(alice, kind, request):
    url = f"/kinds/{kind}/"
    for atomic in (False, True)[: 1 if kind in WITHOUT_ATOMIC_REQUESTS else 2]:
        if atomic:
            request.getfixturevalue("atomic_requests")
        before = effects()
        answer = json.loads(alice.get(url, key="k").content)
        assert (answer["operation"], answer["in_transaction"]) == (None, atomic)
        assert alice.get(f"{url}?crash=1", key="k").status_code == 500
        assert effects() - before == (1 if atomic else 2)
    assert records() == []


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize(
    ("protected", "policy", "others", "sent", "expected"),
    [
        ("post", {}, "", {"method": "POST", "key": "k"}, False),
        ("post", {}, "", {"method": "POST"}, False),  # it is refused
        ("post", {}, "get", {"method": "GET", "key": "k"}, True),
        ("post", {}, "", {"method": "DELETE", "key": "k"}, True),  # there is no such handler
        *[("get", {}, "", {"method": method, "key": "k"}, False) for method in ("GET", "HEAD")],
        ("get", {}, "head", {"method": "HEAD", "key": "k"}, True),
        ("post", {"methods": ("POST",)}, "", {"method": "POST", "key": "k"}, False),
        ("post", {"key_required": False}, "", {"method": "POST", "key": "k"}, False),
        ("post", {"key_required": False}, "", {"method": "POST"}, True),
        ("post", {"key_required": False, "key": FromHeader("Event")}, "", {"method": "POST"}, False),
    ],
)
def test_code_above_a_handler_has_a_transaction_unless_it_is_protected(
    alice, serve, protected, policy, others, sent, expected
):
    class Looking(View):
        def dispatch(self, request, *args, **kwargs):
            seen.append(connection.in_atomic_block)
            return super().dispatch(request, *args, **kwargs)

    def answer(self, request):
        return HttpResponse()

    seen = []
    handlers = {protected: idempotent("tests.looking", **policy)(answer)} | dict.fromkeys(others.split(), answer)
    serve(type("Handling", (Looking,), handlers).as_view())
    alice.request(**sent)
    assert seen == [expected]


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("kind", [*ASYNC, "without a key"])
def test_a_request_passed_through_an_async_view_is_refused_as_by_django(alice, serve, kind, transport, caplog):
    optional = idempotent("tests.optional", key_required=False)(async_answer)
    serve(optional if kind == "without a key" else KINDS[kind][0])
    refused = alice.request("POST" if kind == "without a key" else "GET")
    assert refused.status_code == 500
    assert "You cannot use ATOMIC_REQUESTS with async views." in caplog.text
    assert effects() == 0


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("kind", ASYNC)
def test_an_exempted_async_view_passes_requests_through(alice, serve, kind):
    view = AsyncMethodView.as_view() if kind == "async_method" else idempotent("tests.async")(async_answer)
    serve(transaction.non_atomic_requests(view))
    for answer, in_transaction in ((alice.get(), False), (alice.post(key="k"), True)):
        assert (answer.status_code, answer.json()["in_transaction"]) == (201, in_transaction)


@pytest.mark.usefixtures("atomic_requests")
def test_an_async_handler_under_a_decorator_is_protected(alice, serve):
    def around(handler):
        @functools.wraps(handler)
        async def post(self, request):
            return await handler(self, request)

        return post

    serve(type("Decorated", (AsyncMethodView,), {"post": around(AsyncMethodView.post)}).as_view())
    replayed(alice)


@pytest.mark.usefixtures("atomic_requests")
def test_a_view_that_a_test_calls_without_a_key_has_no_transaction(rf):
    """Django opens none, because no URL led to the view."""
    view = idempotent("tests.called", key_required=False)(lambda request: HttpResponse(connection.in_atomic_block))
    assert view(rf.post("/")).content == b"False"


@pytest.mark.failure_23
@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("way", ["hidden", "inside"])
def test_the_error_of_an_open_transaction_names_the_remedy(alice, serve, way, caplog):
    serve(HiddenView.as_view() if way == "hidden" else transaction.atomic(idempotent("kinds.inside")(plain_answer)))
    assert_refused(alice, "idempotency_outer_transaction", key="k")
    for part in ("put @idempotent directly on the function or method", "non_atomic_requests", f"kinds.{way}"):
        assert part in caplog.text
    serve(transaction.non_atomic_requests(HiddenView.as_view()))  # the remedy
    replayed(alice)


# A handler that leaves a transaction open


def enter(**options):
    transaction.atomic(**options).__enter__()


def blocks():
    """A generator suspended within ``atomic()``, as a fixture or a pipeline may leave one."""
    with transaction.atomic():
        yield


suspended = []


def suspend():
    suspended.append(blocks())
    next(suspended[-1])


@pytest.fixture
def _ended():
    """Close the generators that a test left suspended, long after its request."""
    yield
    while suspended:
        suspended.pop().close()


LEFT_OPEN = {
    "a block": lambda request: enter() or plain_answer(request),
    "a block without a savepoint": lambda request: enter(savepoint=False) or plain_answer(request),
    "two blocks": lambda request: enter() or enter() or plain_answer(request),
    "a generator": lambda request: suspend() or plain_answer(request),
    "a response that is not recorded": lambda request: enter() or HttpResponse(status=503),
    "an async handler": async_answer,
}


def serve_leaving(serve, leave, **policy):
    """Serve an operation whose first run is ``leave``."""
    runs = [leave]

    def view(request):
        return runs.pop()(request) if runs else plain_answer(request)

    async def async_view(request):
        if runs:
            runs.clear()
            await sync_to_async(enter)()
        return await async_answer(request)

    serve(idempotent("tests.leaving", **policy)(async_view if leave is async_answer else view))


def assert_as_before(caller):
    """The thread's next request is served and recorded."""
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    assert (effects(), caller.post(key="next").status_code, effects()) == (0, 201, 1)
    assert records()[-1] == ("completed", 1)


@pytest.mark.usefixtures("_ended")
@policies
@pytest.mark.parametrize("leave", LEFT_OPEN.values(), ids=LEFT_OPEN)
def test_a_handler_that_leaves_a_transaction_open_fails(alice, serve, policy, leave, caplog):
    serve_leaving(serve, leave, **policy)
    assert problem_code(alice.post(key="k")) == "idempotency_transaction_broken"
    assert records() == [("parked" if policy else "recoverable", 1)]
    assert "'default'" in caplog.text
    assert "tests.leaving" in caplog.text
    assert_as_before(alice)


@policies
@pytest.mark.parametrize(("error", "status"), [(ValueError, 500), (Http404, 404)])
def test_an_error_within_a_transaction_left_open_keeps_its_status(alice, serve, policy, error, status):
    def leave(request):
        enter()
        plain_answer(request)
        raise error

    serve_leaving(serve, leave, **policy)
    assert alice.post(key="k").status_code == status
    assert_as_before(alice)
    if status == 404:
        assert alice.post(key="k")["Idempotency-Replayed"] == "true"


@policies
def test_a_savepoint_left_open_ends_with_its_transaction(alice, serve, policy):
    """As without protection. Outside a transaction Django sets no savepoint."""

    @serve
    @idempotent("tests.leaving", **policy)
    def view(request):
        connection.savepoint()
        return plain_answer(request)

    first, _ = replayed(alice)
    assert first.status_code == 201


@pytest.mark.failure_64
@pytest.mark.parametrize("driver", ["reports the state", "can't report it"])
def test_a_handler_that_exits_the_transaction_around_it_is_parked(alice, serve, driver, monkeypatch):
    """For example, it closes a block that an earlier request left open."""
    if driver == "can't report it":
        monkeypatch.setattr(store_for("default"), "watch_transaction", Store(connection).watch_transaction)

    @serve
    @idempotent("tests.leaving")
    def view(request):
        answer = plain_answer(request)
        transaction.atomic().__exit__(None, None, None)
        enter()
        return answer

    assert problem_code(alice.post(key="k")) == "idempotency_transaction_broken"
    assert (effects(), records()) == (1, [("parked", 1)])
    assert not connection.in_atomic_block
