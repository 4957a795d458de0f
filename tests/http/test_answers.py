"""What a handler may return, what becomes of an answer that nobody is sent, and the type that a replay has."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.signals import request_finished
from django.http import (
    FileResponse,
    HttpRequest,
    HttpResponse,
    HttpResponseBadRequest,
    HttpResponseForbidden,
    HttpResponseGone,
    HttpResponseNotFound,
    HttpResponsePermanentRedirect,
    HttpResponseRedirect,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.test import SimpleTestCase
from django.utils.decorators import decorator_from_middleware
from rest_framework.decorators import api_view

from idempotency import current_claim, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, effects, problem_code, replayed, serve_answer
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)


# What is no response


@pytest.mark.parametrize("answer", [{"id": 1}, (201, {"id": 1}), "text", 7], ids=["dict", "tuple", "str", "int"])
def test_a_handler_that_returns_no_response_is_told_which_operation_expected_one(
    alice: Caller, serve: Serve, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serve_answer(serve, lambda: answer)
    for attempt in (1, 2):
        assert problem_code(alice.post(key="k")) == "idempotency_response_unrecordable"
        assert effects() == 0
        record = IdempotencyRecord.objects.get()
        assert (record.status, record.attempt) == (Status.RECOVERABLE, attempt)
    expected = f"The handler of operation 'tests.answer' must return an HttpResponse, not {type(answer).__name__}."
    assert expected in caplog.text


def test_a_coroutine_that_nobody_awaits_is_no_response(alice: Caller, serve: Serve) -> None:
    async def answer() -> HttpResponse:
        raise NotImplementedError

    serve_answer(serve, answer)
    assert problem_code(alice.post(key="k")) == "idempotency_response_unrecordable"


def test_django_says_what_is_wrong_with_none(alice: Caller, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    serve_answer(serve, lambda: None)
    assert alice.post(key="k").status_code == 500
    assert "didn't return an HttpResponse object. It returned None instead." in caplog.text
    assert effects() == 0
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


@pytest.mark.parametrize("answer", [None, {"id": 1}], ids=["None", "dict"])
def test_drf_says_what_is_wrong_with_what_is_no_response(
    alice: Caller, serve: Serve, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @api_view(["POST"])
    @idempotent("tests.nothing")
    def view(request: Any) -> Any:
        work(request)
        return answer

    serve(view)
    assert alice.post(key="k").status_code == 500
    assert "Expected a `Response`, `HttpResponse` or `StreamingHttpResponse`" in caplog.text
    assert effects() == 0
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


# What nobody is sent is closed


class Opened(io.BytesIO):
    """A file that tells whether it was closed."""


def finished(request: Any) -> list[Any]:
    """The list that grows by one each time that Django says that a request is over."""
    seen: list[Any] = []

    def note(**arguments: Any) -> None:
        seen.append(arguments)

    request_finished.connect(note)
    request.addfinalizer(lambda: request_finished.disconnect(note))
    return seen


@pytest.mark.failure_mode(31)
def test_a_file_that_is_refused_is_closed(alice: Caller, serve: Serve, request: pytest.FixtureRequest) -> None:
    opened = Opened(b"content")
    serve_answer(serve, lambda: FileResponse(opened))
    over = finished(request)
    assert problem_code(alice.post(key="k")) == "idempotency_response_unrecordable"
    assert opened.closed
    assert len(over) == 1


@pytest.mark.failure_mode(31)
def test_a_stream_that_is_refused_is_closed_whatever_its_closing_says(alice: Caller, serve: Serve) -> None:
    closed: list[int] = []

    class Stream:
        def __iter__(self) -> Iterator[bytes]:
            yield b"a"

        def close(self) -> None:
            closed.append(1)
            raise OSError("gone already")

    serve_answer(serve, lambda: StreamingHttpResponse(Stream()))
    assert problem_code(alice.post(key="k")) == "idempotency_response_unrecordable"
    assert closed == [1]


@pytest.mark.failure_mode(1)
def test_the_file_of_an_attempt_that_lost_its_lease_is_closed(alice: Caller, serve: Serve) -> None:
    opened = Opened(b"content")

    @idempotent("tests.lost", rebuild=lambda reference, request: HttpResponse(reference))
    def view(request: HttpRequest) -> Any:
        claim = current_claim()
        assert claim is not None
        claim.reference = "late"
        IdempotencyRecord.objects.update(attempt=2)
        return FileResponse(opened)

    serve(view)
    assert problem_code(alice.post(key="k")) == "idempotency_in_progress"
    assert opened.closed


# Failure mode 72: the type of a replay


@pytest.mark.failure_mode(72)
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: HttpResponseRedirect("/there/?a=1"), HttpResponseRedirect),
        (lambda: HttpResponsePermanentRedirect("/there/"), HttpResponsePermanentRedirect),
        (lambda: HttpResponse(status=303, headers={"Location": "/there/"}), HttpResponseRedirect),
        (lambda: HttpResponse(status=308, headers={"Location": "/there/"}), HttpResponsePermanentRedirect),
        (lambda: HttpResponse(status=302), HttpResponse),
        (lambda: HttpResponse(status=201, headers={"Location": "/there/"}), HttpResponse),
        (lambda: JsonResponse({"a": 1}, status=404), JsonResponse),
        (lambda: HttpResponseBadRequest("no"), HttpResponseBadRequest),
        (lambda: HttpResponseForbidden("no"), HttpResponseForbidden),
        (lambda: HttpResponseNotFound("no"), HttpResponseNotFound),
        (lambda: HttpResponseGone("no"), HttpResponseGone),
    ],
    ids=["302", "301", "303", "308", "no location", "201", "json", "400", "403", "404", "410"],
)
def test_a_replay_has_the_class_of_what_it_replays(alice: Caller, serve: Serve, make: Any, kind: type) -> None:
    serve_answer(serve, make)
    first, replay = replayed(alice)
    assert type(replay) is kind
    assert (replay.status_code, replay.content) == (first.status_code, first.content)
    for name in ("Location", "Content-Type"):
        assert replay.get(name) == first.get(name)
    if kind in (HttpResponseRedirect, HttpResponsePermanentRedirect):
        assert replay.url == first["Location"]


@pytest.mark.failure_mode(72)
def test_a_replayed_redirect_can_be_asserted_and_followed(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, lambda: HttpResponseRedirect("/done/"))
    for response in replayed(alice):
        SimpleTestCase().assertRedirects(response, "/done/", fetch_redirect_response=False)


class AppRedirect(HttpResponseRedirect):
    allowed_schemes = ["shop"]  # noqa: RUF012 - Django's own way


@pytest.mark.failure_mode(72)
def test_a_redirect_to_an_app_of_the_project_is_replayed(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, lambda: AppRedirect("shop://orders/1"))
    first, replay = replayed(alice)
    assert replay.url == first.url == "shop://orders/1"


# Headers


def test_an_operation_keeps_the_headers_that_match_its_patterns(alice: Caller, serve: Serve) -> None:
    kept = {"X-Shop-Order": "1", "x-shop-customer": "2"}
    dropped = {"X-Shopping": "3", "Location": "/"}
    serve_answer(serve, lambda: HttpResponse(headers={**kept, **dropped}), headers=["X-Shop-*"])
    _, replay = replayed(alice)
    assert {name: replay[name] for name in kept} == kept
    assert not dropped.keys() & replay.headers.keys()


def test_no_pattern_keeps_a_credential(alice: Caller, serve: Serve) -> None:
    serve_answer(serve, lambda: HttpResponse(headers={"Authorization": "secret", "X-Kept": "1"}), headers=["*"])
    _, replay = replayed(alice)
    assert replay["X-Kept"] == "1"
    assert "Authorization" not in replay


@pytest.mark.parametrize("debug", [True, False])
def test_a_dropped_header_is_said_once_and_under_debug_only(
    alice: Caller, serve: Serve, settings: Any, caplog: pytest.LogCaptureFixture, debug: bool
) -> None:
    settings.DEBUG = debug
    name = f"tests.dropped.{debug}"

    @idempotent(name)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(headers={"X-Dropped": "1", "Location": "/", "Date": "now", "Set-Cookie": "a=b"})

    serve(view)
    for key in ("k1", "k2"):
        assert alice.post(key=key)["X-Dropped"] == "1"
    said = [message for message in caplog.messages if name in message]
    assert len(said) == debug
    if debug:
        assert "X-Dropped" in said[0]


# Failure mode 71: middleware that looks at a template's response before it is rendered


class Titling:
    """Puts a title into the context, as middleware of a project does."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        response.context_data["title"] = "rendered" if response.is_rendered else "set"
        return response


@pytest.mark.failure_mode(71)
def test_template_response_middleware_on_the_view_sees_the_response_unrendered(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.titled")
    @decorator_from_middleware(Titling)  # type: ignore[arg-type]
    def view(request: HttpRequest) -> Any:
        work(request)
        return SimpleTemplateResponse(engines["django"].from_string("title: {{ title }}"), {})  # type: ignore[arg-type]

    serve(view)
    first, replay = replayed(alice)
    assert first.content == replay.content == b"title: set"


@pytest.mark.failure_mode(71)
def test_template_response_middleware_of_the_project_comes_too_late(alice: Caller, serve: Serve, settings: Any) -> None:
    """A limit, and documented as one: the outcome must be known before the COMMIT, and Django calls them after it."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Titling"]
    template = engines["django"].from_string("title: {{ title }}")
    serve_answer(serve, lambda: SimpleTemplateResponse(template, {}))  # type: ignore[arg-type]
    first = alice.post(key="k")
    assert (first.content, first.context_data) == (b"title: ", {"title": "rendered"})
