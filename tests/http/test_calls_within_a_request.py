"""Protected views that a handler calls with its own request: in its thread, in another thread, in tasks, or too late.

A call is part of the running operation only within its claim and on its connection. Every other call makes a separate
claim.
"""

import asyncio
import contextvars
import functools
import json

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction
from django.http import JsonResponse

from idempotency import REEXECUTE, Operation, idempotent
from idempotency.models import IdempotencyRecord
from tests.concurrency.racing import elsewhere
from tests.http.callers import assert_nothing_kept, effects, problem_code, replayed
from tests.http.serving import OUTSIDE, part_of, policies
from tests.http.views import async_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_76]


@pytest.fixture(autouse=True)
def _one_writer_does_not_wait(transactional_db, monkeypatch):
    """On SQLite, another thread can't claim while this thread's transaction is open, so it must fail fast.

    Only connections of other threads get this timeout: this thread's connection is already open.
    """
    if connection.vendor == "sqlite":
        connection.ensure_connection()
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.1)


#: Call in another thread, without and with the caller's context.
threads = pytest.mark.parametrize(
    "carry",
    [lambda call: call, lambda call: functools.partial(contextvars.copy_context().run, call)],
    ids=["bare", "with its context"],
)


def recorded():
    return set(IdempotencyRecord.objects.completed().values_list("operation", flat=True))


def answering_as(*answers):
    return JsonResponse({"answers": [answer.status_code for answer in answers]}, status=201)


def must_have_claimed(answers, *, is_locked_out):
    """The inner operation ran once, or never where SQLite's one writer is the outer transaction."""
    if is_locked_out:
        assert [problem_code(answer) for answer in answers] == ["idempotency_unavailable"] * 2
        assert answers[0]["Retry-After"] == "1"
        assert (effects(), recorded()) == (0, set())
    else:
        assert [answer.status_code for answer in answers] == [201, 201]
        assert answers[1]["Idempotency-Replayed"] == "true"
        assert (effects(), recorded()) == (1, {"tests.inner"})


@threads
@policies
def test_a_call_from_a_thread_of_the_handler_claims_separately(alice, serve, carry, policy):
    """The inner effect isn't in the outer transaction, so the inner record survives the outer run's rollback."""
    inner = idempotent("tests.inner", **policy)(plain_answer)
    answers = []

    @serve
    @idempotent("tests.outer", transaction=not policy, recovery=REEXECUTE)
    def outer(request):
        if not policy:
            work(request)
        answers.append(elsewhere(carry(lambda: inner(request))))
        raise ValueError

    for _ in range(2):
        assert alice.post(key="k").status_code == 500
    must_have_claimed(answers, is_locked_out=connection.vendor == "sqlite" and not policy)


@threads
@policies
def test_the_same_operation_in_a_thread_of_its_handler_is_in_progress(alice, serve, carry, policy):
    operation = Operation.declare("tests.same", **policy)
    inner = idempotent(operation)(plain_answer)

    @serve
    @idempotent(operation)
    def outer(request):
        return answering_as(elsewhere(carry(lambda: inner(request))))

    assert replayed(alice, wrote=0)[0].json() == {"answers": [409]}


def test_tasks_of_an_async_handler_are_part_of_its_operation(alice, serve, transport):
    """Their queries run on the connection that has the transaction."""
    inner = [idempotent(f"tests.{name}")(async_answer) for name in ("one", "two")]

    @serve
    @idempotent("tests.outer")
    async def outer(request):
        answers = await asyncio.gather(*(view(request) for view in inner))
        if "fail" in request.GET:
            raise ValueError
        return answering_as(*answers)

    assert_nothing_kept(alice, 500, "/?fail=1")
    IdempotencyRecord.objects.all().delete()
    assert replayed(alice, wrote=2)[0].json() == {"answers": [201, 201]}
    assert recorded() == {"tests.outer"}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_task_on_another_connection_claims_separately(alice, serve, transport, kind):
    inner = idempotent("tests.inner")(async_answer if kind == "async" else plain_answer)
    answers = []

    def call(request):
        try:
            return async_to_sync(inner)(request) if kind == "async" else inner(request)
        finally:
            connections.close_all()

    @serve
    @idempotent("tests.outer")
    async def outer(request):
        await sync_to_async(work)(request)
        answers.append(await sync_to_async(call, thread_sensitive=False)(request))
        raise ValueError

    for _ in range(2):
        assert alice.post(key="k").status_code == 500
    must_have_claimed(answers, is_locked_out=connection.vendor == "sqlite")


def test_a_call_after_the_end_of_the_claim_claims_separately(alice, serve):
    """The context still has the claim, and the thread still has its connection."""
    kept = []
    inner = idempotent("tests.inner")(plain_answer)

    @idempotent("tests.outer", recordable=lambda status: False)
    def outer(request):
        kept.append(contextvars.copy_context())
        return plain_answer(request)

    @serve
    def view(request):
        outer(request)
        return kept[-1].run(inner, request)

    replayed(alice)
    assert recorded() == {"tests.inner"}


def test_a_call_after_the_commit_claims_separately(alice, serve):
    inner = idempotent("tests.inner")(plain_answer)

    @serve
    @idempotent("tests.outer")
    def outer(request):
        transaction.on_commit(lambda: inner(request))
        return plain_answer(request)

    replayed(alice, wrote=2)
    assert recorded() == {"tests.inner", "tests.outer"}


@policies
def test_a_copy_of_the_request_is_another_request(alice, serve, policy):
    """It may have another key. Within an open transaction it can't claim."""
    inner = idempotent("tests.inner")(plain_answer)

    @serve
    @idempotent("tests.outer", **policy)
    def outer(request):
        return answering_as(inner(part_of(request)))

    answer = alice.post(key="k")
    assert json.loads(answer.content) == {"answers": [201 if policy else 500]}
    found = sorted(IdempotencyRecord.objects.completed().values_list("operation", "idempotency_key"))
    assert found == ([("tests.inner", "part"), ("tests.outer", "k")] if policy else [("tests.outer", "k")])
    assert effects() == (1 if policy else 0)


def test_a_call_with_another_requests_request_claims_separately(alice, serve):
    """The handler of one request calls a second one, whose handler calls the first one's view."""

    @serve
    @idempotent("tests.outer", **OUTSIDE)
    def outer(request):
        if request.META["HTTP_IDEMPOTENCY_KEY"] == "part":
            return plain_answer(request)
        inner = idempotent("tests.inner", **OUTSIDE)(lambda part: answering_as(outer(part)))
        return answering_as(inner(part_of(request)))

    assert alice.post(key="k").status_code == 201
    found = sorted(IdempotencyRecord.objects.completed().values_list("operation", "idempotency_key"))
    assert found == [("tests.inner", "part"), ("tests.outer", "k"), ("tests.outer", "part")]
