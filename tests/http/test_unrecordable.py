"""What can't be recorded is refused before the commit, and what can't be read back is never run a second time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import PARK, current_claim, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, Serve, effects, problem_code, replayed, serve_answer
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)


def stream() -> Iterator[bytes]:
    yield b"a"


async def astream() -> Any:
    yield b"a"


STREAMS: dict[str, Callable[[], Any]] = {
    "stream": lambda: StreamingHttpResponse(stream()),
    "async stream": lambda: StreamingHttpResponse(astream()),
    "file": lambda: FileResponse(io.BytesIO(b"a" * 100)),
    "too large": lambda: HttpResponse(b"a" * 101),
    "too large a failure": lambda: HttpResponse(b"a" * 101, status=400),
}


@pytest.mark.failure_mode(31, 37)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_response_that_cannot_be_recorded_is_refused_before_the_commit(
    alice: Caller, serve: Serve, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    serve_answer(serve, STREAMS[kind], max_body=100)
    for attempt in (1, 2):
        refused = alice.post(key="k")
        assert refused.status_code == 500
        assert problem_code(refused) == "idempotency_response_unrecordable"
        assert refused["Idempotency-Key"] == "k"
        assert effects() == 0
        record = IdempotencyRecord.objects.get()
        assert (record.status, record.attempt) == (Status.RECOVERABLE, attempt)
    assert "tests.answer" in caplog.text
    assert "rebuild" in caplog.text  # the remedy


@pytest.mark.failure_mode(37)
def test_the_cap_is_a_setting_and_a_body_just_below_it_is_kept(alice: Caller, serve: Serve, settings: Any) -> None:
    settings.IDEMPOTENCY = {"MAX_BODY": 10}
    serve_answer(serve, lambda: HttpResponse(b"0123456789"))
    replayed(alice)
    settings.IDEMPOTENCY = {"MAX_BODY": 9}
    assert problem_code(alice.post(key="k2")) == "idempotency_response_unrecordable"
    assert effects() == 1


@pytest.mark.failure_mode(37)
def test_an_effect_outside_of_a_transaction_is_parked_rather_than_repeated(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, STREAMS["stream"], transaction=False, recovery=PARK)
    assert problem_code(alice.post(key="k")) == "idempotency_response_unrecordable"
    assert problem_code(alice.post(key="k")) == "idempotency_outcome_unknown"
    assert effects() == 1


@pytest.mark.failure_mode(31)
def test_a_passing_failure_may_be_a_stream(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, lambda: StreamingHttpResponse(stream(), status=503))
    assert alice.post(key="k").status_code == 503
    assert effects() == 0


@pytest.mark.failure_mode(31)
def test_a_stream_is_rebuilt_from_a_reference(alice: Caller, serve: Serve) -> None:
    @idempotent(
        "tests.report",
        rebuild=lambda reference, request: StreamingHttpResponse([f"report {reference}".encode()], status=201),
    )
    def view(request: HttpRequest) -> Any:
        answer, _ = work(request)
        claim = current_claim()
        assert claim is not None
        claim.reference = str(answer["id"])
        return StreamingHttpResponse([f"report {answer['id']}".encode()], status=201)

    serve(view)
    first = alice.post(key="k")
    content = b"".join(first.streaming_content)
    replay = alice.post(key="k")
    assert b"".join(replay.streaming_content) == content
    assert replay.status_code == 201
    assert replay["Idempotency-Replayed"] == "true"
    assert effects() == 1
    record = IdempotencyRecord.objects.get()
    assert record.response_reference == str(Transfer.objects.get().pk)
    assert record.response_body is None


@pytest.mark.failure_mode(31)
def test_a_drf_response_is_rebuilt_from_a_reference(alice: Caller, serve: Serve) -> None:
    @api_view(["POST"])
    @idempotent("tests.report", rebuild=lambda reference, request: Response({"id": int(reference)}, status=201))
    def view(request: Request) -> Response:
        answer, _ = work(request)
        claim = current_claim()
        assert claim is not None
        claim.reference = str(answer["id"])
        return Response({"id": answer["id"]}, status=201)

    serve(view)
    first, replay = replayed(alice)
    assert (replay.status_code, replay.content) == (first.status_code, first.content)


@pytest.mark.failure_mode(31)
def test_a_reference_that_nothing_reads_is_refused(
    alice: Caller, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    @idempotent("tests.report")
    def view(request: HttpRequest) -> HttpResponse:
        work(request)
        claim = current_claim()
        assert claim is not None
        claim.reference = "7"
        return HttpResponse()

    serve(view)
    refused = alice.post(key="k")
    assert problem_code(refused) == "idempotency_response_unrecordable"
    assert "rebuild" in caplog.text
    assert effects() == 0


@pytest.mark.failure_mode(51)
def test_a_rebuild_that_fails_is_never_a_second_run(alice: Caller, serve: Serve) -> None:
    def rebuild(reference: str, request: HttpRequest) -> HttpResponse:
        raise LookupError(reference)

    @idempotent("tests.report", rebuild=rebuild)
    def view(request: HttpRequest) -> HttpResponse:
        work(request)
        claim = current_claim()
        assert claim is not None
        claim.reference = "7"
        return HttpResponse(status=201)

    serve(view)
    assert alice.post(key="k").status_code == 201
    for _ in range(2):
        assert problem_code(alice.post(key="k")) == "idempotency_outcome_unreadable"
    assert effects() == 1


@pytest.mark.failure_mode(51)
@pytest.mark.parametrize(
    "damage",
    [
        {"response_body": '{"$idempotency-envelope": {"encoding": "rot13"}}'},
        {"response_body": '{"$idempotency-envelope": {"encoding": "base64", "data": "%"}}'},
        {"response_status": 7},
        {"response_status": None},
        {"response_headers": [["a"]]},
        {"response_headers": {"a": 1}},
        {"response_reference": "7", "response_body": None},
    ],
    ids=["envelope", "base64", "status", "no status", "headers", "headers of another shape", "reference"],
)
def test_an_outcome_that_cannot_be_read_is_never_run_a_second_time(
    alice: Caller, serve_operation: Callable[..., None], damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    serve_operation()
    alice.post(key="k")
    IdempotencyRecord.objects.update(**damage)
    for _ in range(2):
        refused = alice.post(key="k")
        assert refused.status_code == 500
        assert problem_code(refused) == "idempotency_outcome_unreadable"
    assert effects() == 1
    assert "idempotency_outcome_unreadable" in caplog.text
