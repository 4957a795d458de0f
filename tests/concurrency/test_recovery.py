"""Recovery of a claim whose process disappeared, as declared: inline at a retry, and by the sweep."""

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse

from idempotency import Completed, NotExecuted, Reconcile, Unknown
from idempotency.models import IdempotencyRecord
from idempotency.operate.purge import purge_batches
from idempotency.operate.resolutions import mark_not_executed
from idempotency.operate.sweep import recover_batches
from idempotency.operation import registry
from idempotency.protocol import ownership
from tests.concurrency.failures import IN_PROGRESS, REUSED, UNKNOWN, failing_database, just_before, problem
from tests.concurrency.traces import effects, end_lease, end_retention, is_replay, record, state
from tests.concurrency.urls import handler
from tests.records import make_records


def found_completed(row):
    return Completed(JsonResponse({"id": 7, "found": True}, status=201))


@pytest.fixture
def abandoned_one(cut_off):
    """A process was killed in an operation that declares a reconciler, and its lease is over."""
    cut_off("/reconciled/")
    make_records(account_id=record().account_id)  # the account has another record, too


@pytest.mark.scenario_3
def test_an_outcome_found_by_a_reconciler_is_recorded_and_replayed(post, abandoned_one):
    seen = []
    handler.find_out = lambda row: seen.append(row) or found_completed(row)
    answers = [post("/reconciled/") for _ in range(3)]

    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id": 7, "found": true}')}
    assert all(answer["Idempotency-Replayed"] == "true" for answer in answers)
    assert [(row.idempotency_key, row.attempt, row.status) for row in seen] == [("k", 2, "in_progress")]
    assert (handler.attempts, effects(), record().status) == ([], [], "completed")


@pytest.mark.failure_119
def test_a_parked_operation_is_not_started_over_past_its_retention(post, cut_off):
    cut_off("/park/")
    end_retention()
    assert [problem(post("/park/")) for _ in range(2)] == [UNKNOWN] * 2
    IdempotencyRecord.objects.update(error="TimeoutError: no answer")
    end_retention()
    assert next(purge_batches()).deleted == 0
    assert problem(post("/park/")) == UNKNOWN
    assert problem(post("/park/", label="another")) == REUSED
    parked = record()
    assert (handler.attempts, parked.attempt, parked.error) == ([], 1, "TimeoutError: no answer")
    # Once its outcome is known, the retention has been over for a while, so the next request is a new one.
    mark_not_executed(parked, by="operator")
    assert post("/park/", label="another").status_code == 201
    assert (handler.attempts, effects()) == ([2], ["another"])


@pytest.mark.failure_119
def test_an_abandoned_claim_past_its_retention_is_reconciled(post, abandoned_one):
    end_retention()
    handler.find_out = found_completed
    assert problem(post("/reconciled/", label="another")) == REUSED
    assert [is_replay(answer, answer) for answer in (post("/reconciled/"), post("/reconciled/"))] == [True] * 2
    assert (handler.attempts, state()) == ([], ("completed", []))


@pytest.mark.failure_119
def test_past_its_retention_a_claim_that_may_run_again_is_a_new_request(post, cut_off):
    cut_off("/again/")
    end_retention()
    assert post("/again/", label="another").status_code == 201
    assert (handler.attempts, effects()) == ([2], ["another"])


def test_an_unknown_outcome_is_reconciled_with_backoff_and_then_parked(post, abandoned_one, settings):
    attempts = []
    handler.find_out = lambda row: attempts.append(row.attempt) or Unknown()
    for attempt, longest, retry_after in ((2, 0.5, "1"), (3, 30, "8")):
        settings.IDEMPOTENCY = {"MAX_RETRY_AFTER": timedelta(seconds=longest)}
        answer = post("/reconciled/")
        assert (problem(answer), answer["Retry-After"]) == (IN_PROGRESS, retry_after)
        assert post("/reconciled/").status_code == 409  # the reconciler is not called again before then
        assert attempts == list(range(2, attempt + 1))
        end_lease()
    assert problem(post("/reconciled/")) == UNKNOWN  # attempt 4 is the last that the operation allows
    assert (*state(), attempts) == ("parked", [], [2, 3, 4])


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
def test_a_failing_reconciler_leaves_the_claim_in_progress(post, abandoned_one, broken, caplog):
    handler.find_out = broken
    assert post("/reconciled/").status_code == 409
    assert (record().status, effects()) == ("in_progress", [])
    assert "race.reconciled" in caplog.text


@pytest.mark.parametrize("by", ["a retry", "the sweep"])
@pytest.mark.parametrize(
    ("finding", "attempt", "retry_after"),
    # Attempt 4 is the last that the operation allows.
    [(Completed(HttpResponse("stale")), 2, "1"), (NotExecuted(), 2, "1"), (Unknown(), 2, "4"), (Unknown(), 4, "1")],
)
def test_a_reconciler_that_lost_its_lease_records_nothing_and_runs_nothing(
    post, abandoned_one, finding, attempt, retry_after, by
):
    """It slept past its lease. The other attempt's reconciler found that nothing had been executed."""
    IdempotencyRecord.objects.update(attempt=attempt - 1)
    winner = []

    def overtaken(row):
        if row.attempt > attempt:
            return NotExecuted()
        end_lease()
        winner.append(post("/reconciled/"))
        return finding

    handler.find_out = overtaken
    if by == "a retry":
        answer = post("/reconciled/")
        assert (answer.status_code, answer["Retry-After"]) == (409, retry_after)
    else:
        assert next(recover_batches()).settled == 0
    assert (winner[0].status_code, handler.attempts, effects()) == (201, [attempt + 1], ["one"])
    assert is_replay(post("/reconciled/"), winner[0])


def test_a_sweep_that_lost_its_claim_before_the_release_counts_nothing(post, abandoned_one):
    handler.find_out = lambda row: NotExecuted()
    with just_before(ownership, "release", lambda held: IdempotencyRecord.objects.update(attempt=9)):
        assert next(recover_batches()).touched == 0
    assert (record().attempt, record().status) == (9, "in_progress")


@pytest.mark.parametrize(("finding", "statement"), [(Completed({}), "complete"), (Unknown(), "postpone")])
def test_a_finding_that_can_not_be_recorded_is_reconciled_again(post, abandoned_one, finding, statement):
    handler.find_out = lambda row: finding
    with failing_database(ownership, statement):
        assert post("/reconciled/").status_code == 503
    assert (next(recover_batches()).touched, record().status) == (0, "in_progress")
    end_lease()
    with failing_database(ownership, statement):
        assert next(recover_batches()).postponed == 1
    end_lease()
    handler.find_out = found_completed
    assert post("/reconciled/").status_code == 201


def test_a_reconciler_is_declared_with_a_function_and_a_bound():
    for wrong in ({"find_out": 7}, {"find_out": print, "max_attempts": 0}, {"find_out": print, "max_attempts": True}):
        with pytest.raises(ImproperlyConfigured, match="Reconcile"):
            Reconcile(**wrong)
    with pytest.raises(TypeError, match="declares no reconciler"):
        _ = registry.get("race.inside").reconcile
