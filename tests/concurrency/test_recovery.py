"""What becomes of a claim whose process disappeared, by declaration: inline at a retry, and by the sweep."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse

from idempotency import Completed, NotExecuted, Reconcile, Unknown, Wait
from idempotency.exceptions import InProgressError
from idempotency.http import exchange
from idempotency.models import IdempotencyRecord
from idempotency.operation import registry
from idempotency.options.values import MAX_WAIT
from idempotency.protocol import claims
from idempotency.upkeep.sweep import RecoveryResult, abandoned, recover_once
from tests.concurrency.racing import PATIENCE, Gate, abandon, effects, end_lease, in_background, race, record
from tests.concurrency.urls import handler, reconciler

pytestmark = pytest.mark.urls("tests.concurrency.urls")

Post = Callable[..., Any]


@pytest.fixture
def cut_off(post: Post) -> Callable[[str], None]:
    """Leave a record as a killed process does, after its lease."""

    def cut_off(path: str) -> None:
        post(path)
        abandon()
        end_lease()
        handler.reset()

    return cut_off


ANSWERS: dict[str, Any] = {
    "completed": lambda row: Completed(JsonResponse({"id": 7, "found": True}, status=201)),
    "not-executed": lambda row: NotExecuted(),
    "unknown": lambda row: Unknown(),
}


# At a retry


@pytest.mark.scenario(3)
def test_what_a_reconciler_finds_completed_is_recorded_and_replayed(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")
    seen: list[IdempotencyRecord] = []
    reconciler.find_out = lambda row: seen.append(row) or ANSWERS["completed"](row)
    answers = [post("/reconciled/") for _ in range(3)]

    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id": 7, "found": true}')}
    assert all(answer["Idempotency-Replayed"] == "true" for answer in answers)
    assert [(row.idempotency_key, row.attempt, row.status) for row in seen] == [("k", 2, "in_progress")]
    assert (handler.attempts, effects(), record().status) == ([], [], "completed")


def test_what_was_not_executed_runs_under_the_reconcilers_own_attempt(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")
    reconciler.find_out = ANSWERS["not-executed"]
    assert post("/reconciled/").json()["attempt"] == 2
    assert (handler.attempts, effects()) == ([2], ["one"])


def test_an_unknown_outcome_is_asked_for_again_with_backoff_and_then_parked(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")
    asked: list[int] = []
    reconciler.find_out = lambda row: asked.append(row.attempt) or Unknown()
    for attempt in (2, 3):
        answer = post("/reconciled/")
        assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_in_progress")
        assert answer["Retry-After"] == str(2**attempt)
        assert post("/reconciled/").status_code == 409  # and nobody is asked before that
        assert asked == list(range(2, attempt + 1))
        end_lease()
    answer = post("/reconciled/")  # attempt 4 is the last that the operation allows
    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_outcome_unknown")
    assert (record().status, asked, effects()) == ("parked", [2, 3, 4], [])


@pytest.mark.parametrize(
    "broken",
    [
        lambda row: 1 / 0,
        lambda row: None,
        lambda row: "completed",
        lambda row: Completed(StreamingHttpResponse(iter([b"x"]))),
        lambda row: Completed(object()),
    ],
)
def test_a_reconciler_that_fails_has_said_nothing(post: Post, cut_off: Any, broken: Any, caplog: Any) -> None:
    cut_off("/reconciled/")
    reconciler.find_out = broken
    assert post("/reconciled/").status_code == 409
    assert (record().status, effects()) == ("in_progress", [])
    assert "race.reconciled" in caplog.text


def test_another_payload_never_reaches_the_reconciler(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")
    reconciler.find_out = lambda row: pytest.fail("asked for somebody else's request")
    assert post("/reconciled/", label="other").status_code == 422


def test_only_one_reconciler_works_on_a_record(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")
    gate, asked = Gate(), []

    def slowly(row: IdempotencyRecord) -> Completed:
        asked.append(row.attempt)
        gate.pass_through()
        return ANSWERS["completed"](row)

    reconciler.find_out = slowly
    with ThreadPoolExecutor() as pool:
        first = in_background(pool, lambda: post("/reconciled/"))
        gate.wait_until_reached()
        assert post("/reconciled/").status_code == 409
        assert recover_once().touched == 0
        gate.open()
        assert first.result(PATIENCE).status_code == 201
    assert asked == [2]


def test_a_reconciler_that_slept_past_its_lease_records_nothing(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")

    def overtaken(row: IdempotencyRecord) -> Completed:
        if row.attempt == 2:
            end_lease()
            winner.append(post("/reconciled/"))
            return Completed(HttpResponse("stale"))
        return ANSWERS["completed"](row)

    winner: list[Any] = []
    reconciler.find_out = overtaken
    late = post("/reconciled/")
    assert late.status_code == 409
    assert winner[0].status_code == 201
    assert post("/reconciled/").content == winner[0].content


@pytest.mark.parametrize("by", ["a retry", "the sweep"])
def test_what_a_slow_reconciler_found_not_executed_is_not_run_once_another_took_over(
    post: Post, cut_off: Any, by: str
) -> None:
    """The other one has run it since."""
    cut_off("/reconciled/")

    def overtaken(row: IdempotencyRecord) -> NotExecuted:
        if row.attempt == 2:
            end_lease()
            winner.append(post("/reconciled/"))
        return NotExecuted()

    winner: list[Any] = []
    reconciler.find_out = overtaken
    if by == "a retry":
        assert post("/reconciled/").status_code == 409
    else:
        assert recover_once().recoverable == 0
    assert (winner[0].status_code, handler.attempts, effects()) == (201, [3], ["one"])
    assert post("/reconciled/").content == winner[0].content


def test_a_sweep_that_lost_its_claim_before_the_release_counts_nothing(
    post: Post, cut_off: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off("/reconciled/")
    reconciler.find_out = ANSWERS["not-executed"]
    release = claims.release

    def overtaken(held: Any) -> bool:
        IdempotencyRecord.objects.update(attempt=9)
        return release(held)

    monkeypatch.setattr(claims, "release", overtaken)
    assert recover_once().touched == 0
    assert (record().attempt, record().status) == (9, "in_progress")


def test_a_finding_that_can_not_be_recorded_is_asked_for_again(
    post: Post, cut_off: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: Any) -> Any:
        raise OperationalError("no route")

    for finding, statement in (("completed", "complete"), ("unknown", "postpone")):
        IdempotencyRecord.objects.all().delete()
        cut_off("/reconciled/")
        reconciler.find_out = ANSWERS[finding]
        with monkeypatch.context() as patched:
            patched.setattr(claims, statement, unreachable)
            assert post("/reconciled/").status_code == 503
            assert (recover_once().touched, record().status) == (0, "in_progress")
        end_lease()
        with monkeypatch.context() as patched:
            patched.setattr(claims, statement, unreachable)
            assert recover_once().postponed == 1
        end_lease()
    reconciler.find_out = ANSWERS["completed"]
    assert post("/reconciled/").status_code == 201


def test_a_reconciler_that_lost_its_record_while_asking_settles_nothing(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")

    def purged(row: IdempotencyRecord) -> Unknown:
        IdempotencyRecord.objects.all().delete()
        return Unknown()

    reconciler.find_out = purged
    assert post("/reconciled/").status_code == 409
    assert post("/reconciled/").status_code == 201


# By the sweep


def test_the_sweep_settles_each_claim_as_its_operation_declares(post: Post, cut_off: Any) -> None:
    reconciler.find_out = lambda row: ANSWERS[row.idempotency_key](row)
    paths = {"in": "/inside/", "again": "/again/", "park": "/park/"} | dict.fromkeys(ANSWERS, "/reconciled/")
    for key, path in paths.items():
        post(path, key=key)
    abandon()
    for key in paths:
        end_lease(key)
    IdempotencyRecord.objects.create(
        account_id="1",
        operation="of.another.service",
        idempotency_key="x",
        request_hash="v1:0",
        status="in_progress",
        lease_expires_at="2000-01-01T00:00Z",
        expires_at="2100-01-01T00:00Z",
    )
    result = recover_once()

    assert {row.idempotency_key: row.status for row in IdempotencyRecord.objects.all()} == {
        "in": "recoverable",
        "again": "recoverable",
        "park": "parked",
        "completed": "completed",
        "not-executed": "recoverable",
        "unknown": "in_progress",
        "x": "in_progress",
    }
    assert result.as_dict() == {
        "recoverable": 3,
        "completed": 1,
        "parked": 1,
        "postponed": 1,
        "unknown_operations": {"of.another.service": 1},
        "exhausted": True,
    }
    assert (result.settled, result.touched) == (5, 6)
    again = recover_once()
    assert (again.touched, again.unknown_operations) == (0, {"of.another.service": 1})
    assert post("/inside/", key="in").status_code == 201


def test_the_sweep_parks_what_stays_unknown(post: Post, cut_off: Any) -> None:
    cut_off("/reconciled/")
    reconciler.find_out = ANSWERS["unknown"]
    IdempotencyRecord.objects.update(attempt=9)
    assert recover_once().parked == 1
    assert record().status == "parked"


def test_the_sweep_leaves_live_claims_and_everything_else_alone(post: Post) -> None:
    for key in ("done", "live"):
        post(key=key)
    IdempotencyRecord.objects.filter(idempotency_key="live").update(
        status="in_progress", lease_expires_at="2100-01-01T00:00Z"
    )
    assert (abandoned().count(), recover_once()) == (0, RecoveryResult())


@pytest.mark.failure_mode(9)
def test_many_sweeps_at_once_settle_each_claim_once(post: Post) -> None:
    for number in range(12):
        post(("/inside/", "/reconciled/")[number % 2], key=f"k{number}")
    abandon()
    for number in range(12):
        end_lease(f"k{number}")
    asked: list[str] = []
    reconciler.find_out = lambda row: asked.append(row.idempotency_key) or ANSWERS["completed"](row)
    results = race([recover_once] * 4)

    assert sum(result.recoverable for result in results) == 6
    assert sum(result.completed for result in results) == 6
    assert sorted(asked) == sorted(f"k{number}" for number in range(1, 12, 2))


def test_a_sweep_takes_a_bounded_batch(post: Post) -> None:
    for number in range(5):
        post(key=f"k{number}")
    abandon()
    for number in range(5):
        end_lease(f"k{number}")
    assert [recover_once(batch_size=2).recoverable for _ in range(4)] == [2, 2, 1, 0]
    for wrong in (0, -1, 10_001):
        with pytest.raises(ValueError, match="batch_size"):
            recover_once(batch_size=wrong)


def test_a_claim_that_was_renewed_since_the_sweep_saw_it_is_left_alone(
    post: Post, cut_off: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off("/reconciled/")
    take_over = claims.take_over_abandoned

    def renewed_meanwhile(*args: Any) -> Any:
        IdempotencyRecord.objects.update(lease_expires_at="2100-01-01T00:00Z")
        return take_over(*args)

    monkeypatch.setattr(claims, "take_over_abandoned", renewed_meanwhile)
    assert recover_once().touched == 0
    assert record().attempt == 1


# Declarations


def test_a_reconciler_is_declared_with_a_function_and_a_bound() -> None:
    for wrong in ({"find_out": 7}, {"find_out": print, "max_attempts": 0}, {"find_out": print, "max_attempts": True}):
        with pytest.raises(ImproperlyConfigured, match="Reconcile"):
            Reconcile(**wrong)
    operation = registry.get("race.inside")
    assert operation is not None
    with pytest.raises(TypeError, match="declares no reconciler"):
        _ = operation.reconcile


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = registry.get("race.inside")
    assert operation is not None
    monkeypatch.setattr(operation, "in_progress", Wait(MAX_WAIT.total_seconds()))


def test_a_waiting_duplicate_gets_the_outcome_when_it_is_there(
    post: Post, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the claim live at least once, for the claimant stops before its transaction."""
    gate, looked = Gate(), Gate()
    run, acquire = exchange.run, claims.acquire

    def stall(claim: Any, attempt: Any) -> Any:
        gate.pass_through()
        return run(claim, attempt)

    def look(*args: Any) -> Any:
        try:
            return acquire(*args)
        except InProgressError:
            looked._reached.set()
            raise

    monkeypatch.setattr(exchange, "run", stall)
    monkeypatch.setattr(claims, "acquire", look)
    with ThreadPoolExecutor() as pool:
        first = in_background(pool, post)
        gate.wait_until_reached()
        second = in_background(pool, post)
        looked.wait_until_reached()
        gate.open()
        answers = [first.result(PATIENCE), second.result(PATIENCE)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert effects() == ["one"]
