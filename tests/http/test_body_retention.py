"""A response that is kept for a shorter time than its record: once it is deleted, a retry is told so and never runs."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.http import FileResponse, HttpResponse, JsonResponse

from idempotency import PARK, Attach, Operation, claim, require_claim
from idempotency.exceptions import BodyGoneError
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_body_batches
from idempotency.operate.resolutions import record_outcome
from idempotency.outcome import BODY_GONE, Outcome, outcome_of, response_of
from idempotency.protocol import claims
from tests.database.claiming import acquire
from tests.http.callers import Caller, assert_refused, effects, replayed
from tests.http.serving import OUTSIDE, Framework, Serve, serve_answer
from tests.operations import forgetting_operations, redeclare
from tests.records import HOUR, database_now, expire, from_now, purge_body_of

pytestmark = pytest.mark.django_db(transaction=True)


def purge_bodies() -> int:
    return sum(batch.deleted for batch in purge_body_batches())


def test_a_retry_after_the_body_is_told_so_and_does_not_run(framework: Framework, alice: Caller) -> None:
    framework.serve(body_ttl=HOUR)
    first, _ = replayed(alice)
    assert purge_bodies() == 0  # it is not due
    assert alice.post(key="k").content == first.content
    purge_body_of("k")
    gone = assert_refused(alice, "idempotency_body_gone", key="k")
    assert "has completed, and its response is no longer kept" in json.loads(gone.content)["detail"]
    assert "Retry-After" not in gone
    assert_refused(alice, "idempotency_key_reused", key="k", data={"amount": 2})
    record = IdempotencyRecord.objects.get()
    assert (record.response_status, record.response_headers, record.body_expires_at) == (201, [], None)
    assert record.completed_at is not None


def test_past_its_retention_the_record_begins_anew_with_a_body_of_its_own(framework: Framework, alice: Caller) -> None:
    framework.serve(body_ttl=HOUR)
    alice.post(key="k")
    purge_body_of("k")
    expire(IdempotencyRecord.objects.get().pk)
    replayed(alice)
    left = IdempotencyRecord.objects.get().body_expires_at
    assert left is not None
    assert timedelta(minutes=59) < left - database_now() <= HOUR


def test_a_record_that_starts_over_forgets_when_its_body_was_due() -> None:
    """Otherwise the next body would be deleted too early, where body_ttl is declared no more."""
    with forgetting_operations("bodies."):
        operation = Operation("bodies.over", body_ttl=HOUR)
        claims.record(acquire(operation), outcome_of(HttpResponse(), operation.policy))
        assert IdempotencyRecord.objects.get().body_expires_at is not None
        expire(IdempotencyRecord.objects.get().pk)
    with forgetting_operations("bodies."):
        assert acquire(Operation("bodies.over")).attempt == 2
        assert IdempotencyRecord.objects.get().body_expires_at is None


# With a reference


def rebuilt(reference: str, request: Any) -> HttpResponse:
    return JsonResponse({"rebuilt": reference})


def answer_with_reference() -> HttpResponse:
    require_claim().reference = "7"
    return HttpResponse(b"first", status=201)


def test_the_body_is_replayed_until_it_is_deleted_and_then_rebuilt(
    serve: Serve, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_answer(serve, answer_with_reference, rebuild=rebuilt, body_ttl=HOUR)
    replayed(alice)
    purge_body_of("k")
    answer = alice.post(key="k")
    assert (json.loads(answer.content), answer["Idempotency-Replayed"]) == ({"rebuilt": "7"}, "true")
    assert effects() == 1
    assert IdempotencyRecord.objects.get().response_body is None  # as of a record that never had one
    redeclare(monkeypatch, "tests.answer", rebuild=None)
    assert_refused(alice, "idempotency_outcome_unreadable", key="k")


def test_what_has_no_body_to_keep_is_recorded_as_its_reference_alone() -> None:
    with forgetting_operations("bodies."):
        plain = Operation("bodies.plain", rebuild=rebuilt, body_ttl=HOUR, max_body=10)
        job = Operation("bodies.job", rebuild=rebuilt, body_ttl=HOUR, in_progress=Attach(lambda scope: "/job/"))
        without = Operation("bodies.without", rebuild=rebuilt)
        for operation, response in (
            (plain, FileResponse(io.BytesIO(b"a"))),
            (plain, HttpResponse(b"a" * 11)),
            (job, HttpResponse(b"it runs", status=202)),
            (without, HttpResponse(b"a")),
        ):
            outcome = outcome_of(response, operation.policy, "7")
            assert (outcome.body, outcome.reference) == (None, "7")
        assert outcome_of(HttpResponse(b"a"), plain.policy, "7").body is not None


def test_the_mark_of_a_deleted_body_is_never_replayed() -> None:
    with pytest.raises(BodyGoneError):
        response_of(Outcome(201, (), BODY_GONE))


# Outside of HTTP


def test_the_result_of_a_block_that_is_deleted_is_an_error_and_the_block_does_not_run() -> None:
    def run() -> Any:
        with forgetting_operations(), claim("bodies.block", account_id="1", key="k", body_ttl=HOUR) as one:
            assert not one.replayed
            one.result = {"id": 1}
        return one.result

    assert run() == {"id": 1}
    purge_body_of("k")
    with pytest.raises(BodyGoneError, match="no longer kept"):
        run()


def test_what_the_body_tells_is_deleted_wherever_it_is_told() -> None:
    with forgetting_operations("bodies."):
        operation = Operation("bodies.steps", body_ttl=HOUR, **OUTSIDE)
        for name in ("secret", "kept"):
            with claim(operation, account_id="1", key=name) as run:
                assert run.claim is not None
                run.claim.step("ask", lambda: "hunter2")
        IdempotencyRecord.objects.update(error="ValueError: hunter2")
        purge_body_of("secret")
    record, kept = IdempotencyRecord.objects.order_by("pk")
    assert (record.response_body, record.error) == (BODY_GONE, None)
    assert kept.error is not None
    assert list(IdempotencyStep.objects.values_list("record_id", flat=True)) == [kept.pk]


def test_an_outcome_that_a_person_records_is_kept_as_long_as_one_of_a_request(settings: Any) -> None:
    with forgetting_operations("bodies."):
        operation = Operation("bodies.parked", transaction=False, recovery=PARK)
        claims.park(acquire(operation))
        settings.IDEMPOTENCY = {"BODY_TTL": HOUR}
        record_outcome(IdempotencyRecord.objects.get(), {"id": 1}, by="ops")
        IdempotencyRecord.objects.update(body_expires_at=from_now(-HOUR))
        assert purge_bodies() == 1
        with pytest.raises(BodyGoneError), claim(operation, account_id="1", key="k", payload={"amount": 1}):
            pass


def test_only_a_completed_record_has_a_response_that_can_be_gone() -> None:
    with forgetting_operations("bodies."):
        acquire(Operation("bodies.claimed", body_ttl=HOUR))
    # A release that doesn't know the column may have left an old time in a record that it started over.
    IdempotencyRecord.objects.update(body_expires_at=from_now(-HOUR))
    assert purge_bodies() == 0
    assert IdempotencyRecord.objects.get().status == Status.IN_PROGRESS
