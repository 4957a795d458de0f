"""What can't be recorded is refused before the commit, and what can't be read back is never run a second time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from rest_framework.response import Response

from idempotency import PARK, idempotent, require_claim
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, assert_nothing_kept, assert_refused, effects, problem_code, replayed
from tests.http.serving import Framework, Serve, serve_answer
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)


def stream() -> Iterator[bytes]:
    yield b"a"


async def astream() -> Any:
    yield b"a"


UNRECORDABLE: dict[str, Callable[[], Any]] = {
    "stream": lambda: StreamingHttpResponse(stream()),
    "async stream": lambda: StreamingHttpResponse(astream()),
    "file": lambda: FileResponse(io.BytesIO(b"a" * 100)),
    "too large": lambda: HttpResponse(b"a" * 101),
    "too large a failure": lambda: HttpResponse(b"a" * 101, status=400),
    "a reference that nothing reads": lambda: referring("7"),
}


def referring(reference: str, response: Any = None) -> Any:
    """A response that is recorded as a reference."""
    require_claim().reference = reference
    return HttpResponse(status=201) if response is None else response


@pytest.mark.scenario(15)
@pytest.mark.failure_mode(31, 37)
@pytest.mark.parametrize("kind", UNRECORDABLE)
def test_a_response_that_cannot_be_recorded_is_refused_before_the_commit(
    alice: Caller, serve: Serve, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    serve_answer(serve, UNRECORDABLE[kind], max_body=100)
    refused = assert_nothing_kept(alice, 500)
    assert problem_code(refused) == "idempotency_response_unrecordable"
    assert refused["Idempotency-Key"] == "k"
    assert "tests.answer" in caplog.text
    for remedy in ("101 bytes", "max_body") if "large" in kind else ("rebuild=",):
        assert remedy in caplog.text


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
    serve_answer(serve, UNRECORDABLE["stream"], transaction=False, recovery=PARK)
    assert problem_code(alice.post(key="k")) == "idempotency_response_unrecordable"
    assert_refused(alice, "idempotency_outcome_unknown", key="k")
    assert effects() == 1


@pytest.mark.failure_mode(31)
def test_a_passing_failure_may_be_a_stream(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, lambda: StreamingHttpResponse(stream(), status=503))
    assert_nothing_kept(alice, 503)


@pytest.mark.failure_mode(31)
def test_a_stream_is_rebuilt_from_a_reference(alice: Caller, serve: Serve) -> None:
    def report(reference: str, request: HttpRequest) -> Any:
        return StreamingHttpResponse([f"report {reference} for {request.user}".encode()], status=201)

    @idempotent("tests.report", rebuild=report)
    def view(request: HttpRequest) -> Any:
        work(request)
        return referring("7", report("7", request))

    serve(view)
    answers = [alice.post(key="k") for _ in range(2)]
    assert [b"".join(answer.streaming_content) for answer in answers] == [b"report 7 for alice"] * 2
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert effects() == 1
    record = IdempotencyRecord.objects.get()
    assert (record.response_reference, record.response_body) == ("7", None)


@pytest.mark.failure_mode(31)
def test_a_drf_response_is_rebuilt_from_a_reference(alice: Caller, serve: Serve) -> None:
    def rebuild(reference: str, request: Any) -> Response:
        return Response({"id": int(reference)}, status=201)

    serve_answer(serve, lambda: referring("7", Response({"id": 7}, status=201)), framework="drf", rebuild=rebuild)
    replayed(alice)


@pytest.mark.failure_mode(51)
def test_a_rebuild_that_fails_is_never_a_second_run(alice: Caller, serve: Serve) -> None:
    def rebuild(reference: str, request: HttpRequest) -> HttpResponse:
        raise LookupError(reference)

    serve_answer(serve, lambda: referring("7"), rebuild=rebuild)
    assert alice.post(key="k").status_code == 201
    for _ in range(2):
        assert_refused(alice, "idempotency_outcome_unreadable", key="k")


@pytest.mark.failure_mode(51)
@pytest.mark.parametrize(
    "damage",
    [
        {"response_body": '{"$idempotency-envelope": 7}'},
        {"response_body": '{"$idempotency-envelope": {"encoding": "rot13", "data": "x"}}'},
        {"response_body": '{"$idempotency-envelope": {"encoding": "rot13"}}'},
        {"response_body": '{"$idempotency-envelope": {"encoding": "base64", "data": "%"}}'},
        {"response_status": 7},
        {"response_status": None},
        {"response_headers": [["a"]]},
        {"response_headers": [["Location", "a\nb"]]},
        {"response_headers": {"a": 1}},
        {"response_reference": "7", "response_body": None},
    ],
    ids=str,
)
def test_an_outcome_that_cannot_be_read_is_never_run_a_second_time(
    alice: Caller, framework: Framework, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    framework.serve()
    alice.post(key="k")
    IdempotencyRecord.objects.update(**damage)
    for _ in range(2):
        assert_refused(alice, "idempotency_outcome_unreadable", key="k")
    assert "idempotency_outcome_unreadable" in caplog.text
