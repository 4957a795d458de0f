"""What a duplicate is told while the record is a claim: alive, or abandoned."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from idempotency import ACCEPTED, PARK, Wait, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, Gate, InThread, Serve, claim_anew, effects, problem_code
from tests.http.views import plain_answer

pytestmark = pytest.mark.django_db(transaction=True)

# Outside of a transaction, a handler that is half way leaves SQLite's one write lock to others, so that the same can
# be seen there. What SQLite does while a handler's transaction is open is a test of its own, further down.
OUTSIDE = {"transaction": False, "recovery": PARK}


@pytest.mark.scenario(12)
def test_a_duplicate_of_a_running_request_gets_409_at_once(alice: Caller, serve: Serve) -> None:
    gate = Gate(plain_answer)
    serve(idempotent("tests.slow", **OUTSIDE)(gate))
    with gate.running(lambda: alice.post(data={"amount": 1}, key="k")) as first:
        for payload in ({"amount": 1}, {"amount": 2}):  # another payload learns no more than the same one
            refused = alice.post(data=payload, key="k")
            assert refused.status_code == 409
            assert problem_code(refused) == "idempotency_in_progress"
            assert 1 <= int(refused["Retry-After"]) <= 30
            assert refused["Idempotency-Key"] == "k"
    assert first.answer().status_code == 201
    assert alice.post(data={"amount": 1}, key="k").content == first.answer().content
    assert effects() == 1


@pytest.mark.scenario(12)
@pytest.mark.postgres
def test_a_duplicate_does_not_wait_for_the_transaction_of_the_first(alice: Caller, serve: Serve) -> None:
    gate = Gate(plain_answer)
    serve(idempotent("tests.slow")(gate))
    with gate.running(lambda: alice.post(key="k")) as first:
        assert effects() == 0  # not committed yet
        assert problem_code(alice.post(key="k")) == "idempotency_in_progress"
    assert first.answer().status_code == 201
    assert effects() == 1


@pytest.mark.scenario(12)
@pytest.mark.sqlite
def test_sqlite_has_one_writer_so_a_duplicate_waits_for_it_and_replays(alice: Caller, serve: Serve) -> None:
    gate = Gate(plain_answer)
    serve(idempotent("tests.slow")(gate))
    with gate.running(lambda: alice.post(key="k")) as first:
        second = InThread(lambda: alice.post(key="k"))
    assert second.answer().content == first.answer().content
    assert second.answer()["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.scenario(12)
@pytest.mark.parametrize("payload", [{"amount": 1}, {"amount": 2}], ids=["same payload", "other payload"])
@pytest.mark.parametrize(("lease", "bound"), [(timedelta(seconds=5), 5), (timedelta(hours=1), 30)])
def test_retry_after_is_bounded_by_the_lease_and_by_the_setting(
    alice: Caller, serve_operation: Callable[..., None], payload: Any, lease: timedelta, bound: int
) -> None:
    serve_operation(lease=timedelta(hours=3))
    alice.post(data={"amount": 1}, key="k")
    claim_anew(lease=lease)  # of a lease of three hours, that is all that is left
    refused = alice.post(data=payload, key="k")
    assert problem_code(refused) == "idempotency_in_progress"
    assert 1 <= int(refused["Retry-After"]) <= bound
    assert effects() == 1


@pytest.mark.scenario(12)
def test_max_retry_after_is_a_setting(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.IDEMPOTENCY = {"MAX_RETRY_AFTER": timedelta(seconds=3)}
    serve(idempotent("tests.long", lease=timedelta(hours=3))(plain_answer))
    alice.post(key="k")
    claim_anew(lease=timedelta(hours=1))
    assert alice.post(key="k")["Retry-After"] == "3"


@pytest.mark.scenario(12)
@pytest.mark.parametrize("by", ["policy", "setting"])
def test_a_duplicate_is_accepted_where_the_operation_says_so(
    alice: Caller, serve_operation: Callable[..., None], settings: Any, by: str
) -> None:
    if by == "setting":
        settings.IDEMPOTENCY = {"IN_PROGRESS": ACCEPTED}
        serve_operation()
    else:
        serve_operation(in_progress=ACCEPTED)
    alice.post(data={"amount": 1}, key="k")
    claim_anew()
    for payload in ({"amount": 1}, {"amount": 2}):
        accepted = alice.post(data=payload, key="k")
        assert accepted.status_code == 202
        assert 1 <= int(accepted["Retry-After"]) <= 30
        assert accepted["Idempotency-Key"] == "k"
        assert json.loads(accepted.content)["status"] == "in_progress"
    assert effects() == 1


@pytest.mark.scenario(12)
def test_a_waiting_duplicate_is_given_the_outcome(alice: Caller, serve: Serve) -> None:
    gate = Gate(plain_answer)
    serve(idempotent("tests.slow", in_progress=Wait(20), **OUTSIDE)(gate))
    with gate.running(lambda: alice.post(key="k")) as first:
        second = InThread(lambda: alice.post(key="k"))
    assert second.answer().status_code == 201
    assert second.answer().content == first.answer().content
    assert second.answer()["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.scenario(12)
@pytest.mark.parametrize("payload", [{"amount": 1}, {"amount": 2}], ids=["same payload", "other payload"])
def test_a_wait_is_bounded_and_ends_in_409(alice: Caller, serve_operation: Callable[..., None], payload: Any) -> None:
    serve_operation(in_progress=Wait(0.2))
    alice.post(data={"amount": 1}, key="k")
    claim_anew()
    refused = alice.post(data=payload, key="k")
    assert problem_code(refused) == "idempotency_in_progress"
    assert effects() == 1


@pytest.mark.scenario(12)
def test_an_abandoned_claim_is_run_again_once_and_only_for_its_payload(
    alice: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    alice.post(data={"amount": 1}, key="k")
    Transfer.objects.all().delete()
    claim_anew(lease=-timedelta(seconds=1))  # the process died before its COMMIT
    assert problem_code(alice.post(data={"amount": 2}, key="k")) == "idempotency_key_reused"
    assert effects() == 0
    again = alice.post(data={"amount": 1}, key="k")
    assert again.status_code == 201
    assert "Idempotency-Replayed" not in again
    assert alice.post(data={"amount": 1}, key="k").content == again.content
    assert effects() == 1
    assert IdempotencyRecord.objects.get().attempt == 2


@pytest.mark.scenario(12)
def test_an_abandoned_claim_of_a_parked_operation_is_never_run_again(
    alice: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation(**OUTSIDE)
    alice.post(data={"amount": 1}, key="k")
    claim_anew(lease=-timedelta(seconds=1))
    assert problem_code(alice.post(data={"amount": 2}, key="k")) == "idempotency_key_reused"
    for _ in range(2):
        refused = alice.post(data={"amount": 1}, key="k")
        assert refused.status_code == 409
        assert problem_code(refused) == "idempotency_outcome_unknown"
        assert "Retry-After" not in refused
        assert refused["Idempotency-Key"] == "k"
    assert IdempotencyRecord.objects.get().status == Status.PARKED
    assert problem_code(alice.post(data={"amount": 2}, key="k")) == "idempotency_key_reused"
    assert effects() == 1
