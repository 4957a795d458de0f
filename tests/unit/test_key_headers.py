"""The table of ``Idempotency-Status``: every way in which a request with a key ends."""

import pytest

from idempotency import exceptions
from idempotency.exceptions import IdempotencyError
from idempotency.http.key_headers import STATUSES, Reached, key_status

CODES = {
    error.code for error in vars(exceptions).values() if isinstance(error, type) and issubclass(error, IdempotencyError)
}


@pytest.mark.parametrize(
    ("reached", "status"),
    [
        (Reached.NOTHING, "unknown"),
        (Reached.NO_PROTECTION, "ignored"),
        (Reached.ATTEMPT, "not-recorded"),
        (Reached.UNKNOWN_EFFECT, "unknown"),
        (Reached.COMMIT, "executed"),
        (Reached.OUTCOME, "recorded"),
        (Reached.JOB, "in-progress"),
        (Reached.REPLAY, "replayed"),
    ],
)
def test_a_request_that_ends_without_an_error(reached, status):
    assert key_status(reached) == status
    assert status in STATUSES


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("idempotency_key_missing", "not-recorded"),
        ("idempotency_key_expired", "not-recorded"),
        ("idempotency_in_progress", "in-progress"),
        ("idempotency_key_reused", "reused"),
        ("idempotency_outcome_unknown", "unknown"),
        ("idempotency_lease_lost", "unknown"),
        ("idempotency_transaction_broken", "unknown"),
        ("idempotency_unavailable", "unknown"),
        ("idempotency_body_gone", "recorded"),
        ("idempotency_outcome_unreadable", "recorded"),
    ],
)
def test_an_error_that_tells_about_the_record(code, status):
    assert code in CODES
    assert {key_status(reached, code) for reached in Reached if reached is not Reached.OUTCOME} == {status}


@pytest.mark.failure_88
@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_keeps_the_promises(code):
    # A client that concludes that nothing was recorded repeats the operation.
    assert key_status(Reached.OUTCOME, code) == "recorded"
    # Without a look at the record, only the key itself tells that nothing is recorded.
    if key_status(Reached.NOTHING, code) == "not-recorded":
        assert code in {"idempotency_key_missing", "idempotency_key_expired"}
    # What ran without a transaction may have taken effect.
    assert key_status(Reached.UNKNOWN_EFFECT, code) != "not-recorded" or code.startswith("idempotency_key_")
