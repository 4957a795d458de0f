"""What ``redact`` removes is sent to the first client, and neither recorded nor sent again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from django.http import HttpResponse

from idempotency import claim
from idempotency.exceptions import UnrecordableResponseError
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, assert_nothing_kept, effects, problem_code
from tests.http.serving import OUTSIDE, Framework, Serve, serve_answer
from tests.operations import forgetting_operations

pytestmark = pytest.mark.django_db

SECRET = {"id": 7, "token": "hunter2"}
REDACTED = {"id": 7, "token": None}


def without_token(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    assert (status, headers["content-type"]) == (201, "application/json")
    return json.dumps({**json.loads(body), "token": None}).encode()


def test_the_first_client_gets_the_whole_body_and_a_retry_the_redacted_one(framework: Framework, alice: Caller) -> None:
    framework.serve(lambda request: (SECRET, 201), redact=without_token)
    first, retry = alice.post(key="k"), alice.post(key="k")
    assert json.loads(first.content) == SECRET
    assert (json.loads(retry.content), retry["Idempotency-Replayed"]) == (REDACTED, "true")
    assert (retry.status_code, retry["Content-Type"]) == (first.status_code, first["Content-Type"])
    assert "hunter2" not in (IdempotencyRecord.objects.get().response_body or "")


def fail(*outcome: Any) -> bytes:
    raise ValueError(outcome)


@pytest.mark.parametrize("redact", [fail, lambda body: body, lambda *outcome: "a text"])
def test_a_body_that_was_not_redacted_is_not_recorded(serve: Serve, alice: Caller, redact: Any, caplog: Any) -> None:
    serve_answer(serve, lambda: HttpResponse(b"hunter2"), redact=redact)
    assert problem_code(assert_nothing_kept(alice, 500)) == "idempotency_response_unrecordable"
    assert "redact= of operation 'tests.answer'" in caplog.text
    assert "hunter2" not in caplog.text  # the error of fail() quotes the body


def test_an_effect_whose_outcome_was_not_redacted_is_parked(serve: Serve, alice: Caller) -> None:
    serve_answer(serve, lambda: HttpResponse(b"hunter2"), redact=fail, **OUTSIDE)
    codes = [problem_code(alice.post(key="k")) for _ in range(2)]
    assert codes == ["idempotency_response_unrecordable", "idempotency_outcome_unknown"]
    assert effects() == 1


def test_an_empty_body_needs_no_redaction(serve: Serve, alice: Caller) -> None:
    serve_answer(serve, lambda: HttpResponse(status=204), redact=fail)
    assert [alice.post(key="k").status_code for _ in range(2)] == [204, 204]


def run(redact: Any) -> Any:
    with forgetting_operations(), claim("redacted.block", account_id="1", key="k", redact=redact) as run:
        if not run.replayed:
            run.result = SECRET
    return run.result


@pytest.mark.django_db(transaction=True)
def test_the_result_of_a_block_is_redacted_and_stays_json() -> None:
    with pytest.raises(TypeError, match="must turn a result into JSON"):
        run(lambda *outcome: b"no JSON: hunter2")
    with pytest.raises(UnrecordableResponseError, match=r"raised ValueError in line \d+ of .*test_redaction\.py"):
        run(fail)
    assert IdempotencyRecord.objects.get().status == "recoverable"
    assert [run(lambda *outcome: json.dumps(REDACTED).encode()) for _ in range(2)] == [SECRET, REDACTED]
