"""``begin()``: a handler that first calls another service, and then writes in one transaction with its outcome."""

from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from functools import partial

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.http import Http404, HttpResponse, JsonResponse
from django.urls import path

from idempotency import REEXECUTE, claim, idempotent, require_claim
from idempotency.exceptions import LeaseLostError, OuterTransactionError, UnavailableError
from idempotency.models import IdempotencyRecord
from idempotency.protocol.faults import fault_point
from testproject.models import Transfer
from tests.aliases import at_level, reconnected
from tests.concurrency.failures import BROKEN, UNAVAILABLE, UNKNOWN, Killed, cut_connection, error_of, fail, problem
from tests.concurrency.racing import elsewhere
from tests.concurrency.traces import effects, end_lease, is_replay, record, state
from tests.concurrency.trouble.test_commit import business_commit, execute, lose, unreachable
from tests.concurrency.urls import account_of, handler

OUTSIDE = {"transaction": False, "recovery": REEXECUTE}


class Provider:
    """Deduplicates by the derived key, as a provider for REEXECUTE must."""

    def __init__(self):
        self.calls, self.charges = [], set()

    def charge(self, request=None):
        key = require_claim().derive_key("charge")
        self.calls.append(key)
        self.charges.add(key)


def begin(request=None):
    require_claim().begin()


@pytest.fixture
def provider():
    """A handler that charges, calls ``begin()`` unless it is in a transaction, and then writes a row."""
    provider = Provider()

    def charge_and_begin(request):
        provider.charge()
        if request.path != "/inside/":
            begin()

    handler.before = charge_and_begin
    return provider


def kill():
    raise Killed


def kill_at(monkeypatch, point, post, path="/again/"):
    with monkeypatch.context() as patch:
        patch.setitem(fault_point, point, kill)
        with suppress(Killed):
            post(path)


POINTS = ["begin.before", "begin.after", "render.before", "complete.before", "complete.committed"]


@pytest.mark.failure_110
@pytest.mark.parametrize("point", POINTS)
def test_rows_and_outcome_are_committed_together_wherever_the_process_dies(post, provider, monkeypatch, point):
    kill_at(monkeypatch, point, post)
    if point == "complete.committed":
        assert state() == ("completed", ["one"])
    else:
        assert state() == ("in_progress", [])
        end_lease()
    answers = [post("/again/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert (state(), len(provider.charges)) == (("completed", ["one"]), 1)


@pytest.mark.failure_110
def test_without_begin_a_killed_attempt_doubles_its_row(post, provider, monkeypatch):
    handler.before = provider.charge
    kill_at(monkeypatch, "render.before", post)
    end_lease()
    assert post("/again/").status_code == 201
    assert (effects(), len(provider.charges)) == (["one", "one"], 1)


@pytest.mark.parametrize(
    ("path", "status"), [("/again/", "recoverable"), ("/park/", "parked"), ("/reconciled/", "in_progress")]
)
@pytest.mark.parametrize(
    "end",
    [fail, lambda request: HttpResponse(status=502), lambda request: require_claim().discard()],
    ids=["error", "502", "discard"],
)
def test_a_handler_that_fails_is_undone_and_recovered_as_declared(post, provider, path, status, end):
    handler.after = end
    assert post(path).status_code in {500, 502, 201}
    assert state() == (status, [])


@pytest.mark.parametrize("raises", [True, False])
def test_a_raised_refusal_is_undone_and_a_returned_one_keeps_its_rows(post, provider, raises):
    def refuse(request):
        if raises:
            raise Http404
        return HttpResponse(status=404)

    handler.after = refuse
    answers = [post("/park/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert (state(), len(provider.calls)) == (("completed", [] if raises else ["one"]), 1)


def take_over(request=None):
    elsewhere(lambda: IdempotencyRecord.objects.update(attempt=2))


@pytest.mark.failure_3
def test_a_lost_lease_is_found_before_rows_are_written(post):
    reached = []

    def overtaken(request):
        take_over()
        with pytest.raises(LeaseLostError):
            begin()
        reached.append(connection.in_atomic_block)
        require_claim().ensure_owned()

    handler.before = overtaken
    assert post("/again/").status_code == 409
    assert (reached, effects(), record().attempt) == ([False], [], 2)


@pytest.mark.failure_3
@pytest.mark.except_sqlite  # there its transaction keeps others from taking over
def test_rows_of_an_attempt_that_is_overtaken_after_begin_are_undone(post, provider):
    handler.after = take_over
    assert post("/again/").status_code == 409
    assert (effects(), record().attempt) == ([], 2)


@pytest.mark.failure_74
@pytest.mark.postgres
def test_a_connection_that_died_during_the_call_is_replaced(post, provider):
    def charge(request):
        provider.charge()
        cut_connection()
        begin()

    handler.before = charge
    first = post("/park/")
    assert first.status_code == 201
    assert is_replay(post("/park/"), first)
    assert (effects(), len(provider.calls)) == (["one"], 1)


@contextmanager
def at_commit(replacement):
    """Replace the COMMIT of the handler's transaction. On MariaDB its renewal has one, too."""
    with ExitStack() as stack:
        handler.after = lambda request: stack.enter_context(business_commit(replacement))
        yield
        handler.after = lambda request: None


@pytest.mark.failure_12
@pytest.mark.parametrize("path", ["/inside/", "/again/", "/park/"])
def test_a_commit_whose_answer_is_lost_does_not_count_as_failed(post, provider, path):
    with at_commit(lambda commit: commit() or unreachable()):
        answer = post(path)
    assert (problem(answer), answer["Retry-After"]) == (UNAVAILABLE, "1")
    retry = post(path)
    assert (retry.status_code, retry["Idempotency-Replayed"]) == (201, "true")
    assert (state(), len(provider.calls)) == (("completed", ["one"]), 1)


@pytest.mark.postgres
@pytest.mark.parametrize(
    "options",
    [{"server_side_binding": True}, {"server_side_binding": True, "prepare_threshold": 0}, {"prepare_threshold": None}],
    ids=["binding", "prepared", "never prepared"],
)
def test_begin_works_however_parameters_are_bound(post, provider, options):
    with reconnected(**options):
        first = post("/again/")
        assert first.status_code == 201
        assert is_replay(post("/again/"), first)
    assert (state(), len(provider.calls)) == (("completed", ["one"]), 1)


@pytest.mark.postgres
@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_begin_renews_before_the_snapshot_of_its_transaction(post, provider, level):
    with at_level(level):
        assert post("/again/").status_code == 201
    assert state() == ("completed", ["one"])


@pytest.mark.failure_12
@pytest.mark.parametrize(("path", "retry"), [("/inside/", (201, "")), ("/again/", (201, "")), ("/park/", UNKNOWN)])
def test_a_commit_that_never_arrived_is_recovered_as_declared(post, provider, path, retry):
    with at_commit(lose):
        assert problem(post(path)) == UNAVAILABLE
    assert state() == ("in_progress", [])
    assert post(path).status_code == 409
    end_lease()
    answer = post(path)
    assert (answer.status_code, answer.json().get("code", "")) == retry
    assert (effects(), len(provider.charges)) == (["one"] if retry[0] == 201 else [], 1)


@pytest.mark.parametrize(
    ("path", "status"), [("/inside/", "recoverable"), ("/again/", "recoverable"), ("/park/", "parked")]
)
def test_a_commit_that_the_server_refuses_is_recovered_as_declared(post, provider, path, status, monkeypatch):
    error = error_of(monkeypatch, "40001", "lost_a_race", "commit_was_refused")

    def refuse(commit):
        connection.connection.rollback()
        raise error

    with at_commit(refuse):
        answer = post(path)
    assert (problem(answer), answer["Retry-After"]) == (UNAVAILABLE, "1")
    assert state() == (status, [])
    assert "OperationalError" in record().error
    assert status == "parked" or post(path).status_code == 201


def test_a_transaction_that_can_not_be_begun_is_unavailable(post, monkeypatch):
    def fail_to_begin(request):
        with monkeypatch.context() as patch:
            patch.setattr(connection, "set_autocommit", unreachable)
            with pytest.raises(UnavailableError) as error:
                begin()
        raise error.value

    handler.before = fail_to_begin
    answer = post("/again/")
    assert (problem(answer), answer["Retry-After"]) == (UNAVAILABLE, "1")
    assert state() == ("recoverable", [])


def begun_in_a_step():
    require_claim().step("begin", begin)


def begun_in_a_transaction():
    with transaction.atomic():
        begin()


def begun_twice():
    begin()
    begin()


def begun_in_another_thread():
    elsewhere(partial(copy_context().run, begin))


def begun_for_an_outer_claim():
    outer = require_claim()
    with claim("tests.begin.inner", account_id="1", key="k", **OUTSIDE):
        outer.begin()


@pytest.mark.parametrize(
    ("wrong", "path", "error", "remedy"),
    [
        (begin, "/inside/", ImproperlyConfigured, "Remove begin"),
        (begun_twice, "/again/", RuntimeError, "Call begin.. once"),
        (begun_in_a_transaction, "/again/", OuterTransactionError, r"outside of\s+atomic"),
        (begun_in_a_step, "/again/", RuntimeError, "after the last step"),
        (begun_in_another_thread, "/again/", RuntimeError, "in the thread that runs the handler"),
        (begun_for_an_outer_claim, "/again/", RuntimeError, "within another claim"),
    ],
)
def test_a_misplaced_begin_is_refused_with_the_remedy(post, wrong, path, error, remedy):
    def refused(request):
        with pytest.raises(error, match=remedy):
            wrong()

    handler.before = refused
    assert post(path).status_code == 201
    assert state() == ("completed", ["one"]) if wrong is not begun_for_an_outer_claim else effects() == ["one"]


def test_a_begin_after_the_end_of_its_handler_is_refused(post):
    claims = []
    handler.before = lambda request: claims.append(require_claim())
    assert post("/again/").status_code == 201
    with pytest.raises(RuntimeError, match="after its handler had ended"):
        claims[0].begin()
    assert not connection.in_atomic_block


def test_a_step_after_begin_is_refused_with_the_remedy(post, provider):
    def step(request):
        with pytest.raises(OuterTransactionError, match=r"before begin\(\)"):
            require_claim().step("mail", lambda: None)

    handler.after = step
    assert post("/again/").status_code == 201


def test_a_step_before_begin_is_kept_and_its_row_is_written_once(post, monkeypatch):
    made = []

    def step_and_begin(request):
        require_claim().step("charge", lambda: made.append(1))
        begin()

    handler.before = step_and_begin
    kill_at(monkeypatch, "complete.before", post)
    end_lease()
    assert post("/again/").status_code == 201
    assert (effects(), made) == (["one"], [1])


def test_a_lease_can_be_renewed_after_begin(post, provider):
    handler.after = lambda request: require_claim().renew()
    assert post("/again/").status_code == 201
    assert state() == ("completed", ["one"])


def test_a_handler_that_sets_rollback_keeps_neither_row_nor_outcome(post, provider):
    handler.after = lambda request: transaction.set_rollback(True)
    assert post("/again/").status_code == 201
    assert state() == ("recoverable", [])


@pytest.mark.failure_99
def test_a_transaction_left_open_within_it_is_undone(post, provider):
    handler.after = lambda request: transaction.atomic().__enter__() and None
    assert problem(post("/again/")) == BROKEN
    assert (connection.in_atomic_block, *state()) == (False, "recoverable", [])


@pytest.mark.failure_64
def test_a_commit_by_raw_sql_is_detected_even_if_begin_is_within_a_wrapper(post):
    seen = []

    def wrapper(call, sql, *rest):
        seen.append(sql)
        return call(sql, *rest)

    def begin_within_a_wrapper(request):
        with connection.execute_wrapper(wrapper):
            begin()
            Transfer.objects.count()
        seen.clear()

    handler.before = begin_within_a_wrapper
    handler.after = execute("COMMIT")
    assert problem(post("/again/")) == BROKEN
    assert (record().status, effects(), seen, connection.execute_wrappers) == ("parked", ["one"], [], [])


def test_a_nested_view_in_the_transaction_is_part_of_the_operation(post, settings):
    inner = idempotent("tests.begin.nested", account=account_of)(lambda request: HttpResponse(status=201))

    @idempotent("tests.begin.outer", account=account_of, **OUTSIDE)
    def outer(request):
        begin()
        Transfer.objects.create(account_id=int(account_of(request)), amount=1, label="one")
        return inner(request)

    settings.ROOT_URLCONF = (path("outer/", outer),)
    assert post("/outer/").status_code == 201
    assert state() == ("completed", ["one"])


def test_a_block_begins_its_transaction(account, monkeypatch):
    def send(fails):
        with claim("tests.begin.block", account_id=account, key="k", **OUTSIDE) as run:
            run.claim.begin()
            Transfer.objects.create(account_id=int(account), amount=1, label="one")
            if fails:
                fail()
            run.result = 1

    with pytest.raises(RuntimeError, match="on purpose"):
        send(fails=True)
    assert state() == ("recoverable", [])
    send(fails=False)
    assert state() == ("completed", ["one"])


def test_an_async_handler_begins_by_sync_to_async(account, settings, post):
    refusals = []

    @idempotent("tests.begin.async", account=account_of, **OUTSIDE)
    async def view(request):
        try:
            begin()
        except RuntimeError as error:
            refusals.append(str(error))
        await sync_to_async(begin)()
        await Transfer.objects.acreate(account_id=int(account), amount=1, label="one")
        if len(refusals) == 1:
            fail()
        return JsonResponse({}, status=201)

    settings.ROOT_URLCONF = (path("async/", view),)
    assert post("/async/").status_code == 500
    assert state() == ("recoverable", [])
    assert post("/async/").status_code == 201
    assert state() == ("completed", ["one"])
    assert all("sync_to_async(claim.begin)" in refusal for refusal in refusals)


@pytest.mark.django_db
def test_begin_works_in_a_test_case(rf, django_user_model):
    account = django_user_model.objects.create(username="carol")

    @idempotent("tests.begin.case", account=account_of, **OUTSIDE)
    def view(request):
        begin()
        Transfer.objects.create(account=account, amount=1, label="one")
        if request.headers["Idempotency-Key"] == "fails":
            fail()
        return JsonResponse({}, status=201)

    def send(key):
        return view(rf.post("/", headers={"Idempotency-Key": key, "X-Account": str(account.pk)}))

    with pytest.raises(RuntimeError, match="on purpose"):
        send("fails")
    assert (effects(), record("fails").status) == ([], "recoverable")
    assert [send("k").status_code for _ in range(2)] == [201, 201]
    assert effects() == ["one"]
