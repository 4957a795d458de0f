"""The responses that a handler may return in any framework, unsent responses, and the class of a replay."""

import json
import re
from unittest.mock import Mock

import pytest
from django import http
from django.core.signals import request_finished
from django.db import transaction
from django.http import HttpResponse, JsonResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.utils import translation
from django.utils.decorators import decorator_from_middleware
from django.utils.deprecation import MiddlewareMixin
from django.utils.functional import SimpleLazyObject
from django.utils.translation import trans_real
from rest_framework.response import Response

from idempotency import checks_nothing, idempotent, require_claim
from idempotency.http.adapter import Adapter, adapters, register
from idempotency.models import IdempotencyRecord
from tests.http.callers import assert_nothing_kept, problem_code, replayed
from tests.http.serving import serve_answer
from tests.http.views import work

# The stored form of responses is tested on each database in ``test_responses``.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


async def coroutine():
    """Never awaited."""


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("plain", lambda: {"id": 1}, "The handler of operation 'tests.answer' must return an HttpResponse, not dict."),
        ("plain", coroutine, "must return an HttpResponse, not coroutine."),
        ("plain", lambda: None, "must return an HttpResponse, not NoneType."),
        ("drf", lambda: None, "Expected a `Response`, `HttpResponse` or `StreamingHttpResponse`"),
        ("drf", lambda: {"id": 1}, "Expected a `Response`, `HttpResponse` or `StreamingHttpResponse`"),
    ],
)
def test_a_handler_that_returns_no_response_gets_an_error_with_the_type(alice, serve, name, make, message, caplog):
    serve_answer(serve, make, framework=name)
    refused = assert_nothing_kept(alice, 500)
    if "must return" in message:
        assert problem_code(refused) == "idempotency_response_unrecordable"
    assert message in caplog.text


class Stream(list):
    """A stream that records whether it was closed, and whose ``close()`` fails."""

    closed = False

    def close(self):
        self.closed = True
        raise OSError("gone already")


def that_fails_to_render(stream):
    response = SimpleTemplateResponse("none.html")
    response._resource_closers.append(stream.close)
    return response


@pytest.mark.failure_1
@pytest.mark.failure_31
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("idempotency_response_unrecordable", http.FileResponse),
        ("idempotency_response_unrecordable", lambda stream: stream),
        ("idempotency_in_progress", http.FileResponse),
        (None, that_fails_to_render),
    ],
)
def test_the_stream_of_an_unsent_response_is_closed(alice, serve, caplog, code, answer):
    stream, over = Stream(), Mock()

    @serve
    @idempotent("tests.stream", rebuild=lambda reference, request: HttpResponse(reference))
    def view(request):
        if code == "idempotency_in_progress":
            require_claim().reference = "late"
            IdempotencyRecord.objects.update(attempt=2)
        return answer(stream)

    request_finished.connect(over)
    refused = alice.post(key="k")
    assert (refused.status_code if code is None else problem_code(refused)) == (code or 500)
    assert (stream.closed, over.call_count) == (True, 1)
    warned = re.search("Attempt 1 of operation 'tests.stream', key .+, trace [0-9a-f]{32} lost its lease", caplog.text)
    assert (warned is not None) == (code == "idempotency_in_progress")


class AppRedirect(http.HttpResponseRedirect):
    allowed_schemes = ["shop"]


@pytest.mark.failure_72
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: http.HttpResponseRedirect("/there/?a=1"), http.HttpResponseRedirect),
        (lambda: http.HttpResponsePermanentRedirect("/there/"), http.HttpResponsePermanentRedirect),
        (lambda: HttpResponse(status=303, headers={"Location": "/there/"}), http.HttpResponseRedirect),
        (lambda: HttpResponse(status=308, headers={"Location": "/there/"}), http.HttpResponsePermanentRedirect),
        (lambda: AppRedirect("shop://orders/1"), http.HttpResponseRedirect),
        (lambda: HttpResponse(status=302), HttpResponse),
        (lambda: HttpResponse(status=201, headers={"Location": "/there/"}), HttpResponse),
        (lambda: JsonResponse({"a": 1}, status=404), JsonResponse),
        (lambda: http.HttpResponseBadRequest("no"), http.HttpResponseBadRequest),
        (lambda: http.HttpResponseForbidden("no"), http.HttpResponseForbidden),
        (lambda: http.HttpResponseNotFound("no"), http.HttpResponseNotFound),
        (lambda: http.HttpResponseGone("no"), http.HttpResponseGone),
    ],
    ids=["302", "301", "303", "308", "app", "no location", "201", "json", "400", "403", "404", "410"],
)
def test_a_replay_has_the_class_of_the_first_response(alice, serve, make, kind):
    serve_answer(serve, make)
    first, replay = replayed(alice)
    assert type(replay) is kind
    for name in ("Location", "Content-Type"):
        assert replay.get(name) == first.get(name)
    if kind in (http.HttpResponseRedirect, http.HttpResponsePermanentRedirect):
        assert replay.url == first["Location"]


def answer_with_cookie(headers):
    response = HttpResponse(b"{}", headers=headers)
    response.set_cookie("session", "secret")
    return response


KEPT = {
    "Location": "/transfers/1/",
    "ETag": '"abc"',
    "Content-Language": "de",
    "Cache-Control": "no-store",
    "Content-Disposition": 'attachment; filename="a.csv"',
    "Retry-After": "7",
    "Vary": "Accept-Language",
    "Link": '</a>; rel="next", </b>; rel="last"',
    "Content-Type": "application/vnd.example+json",
}
CREDENTIALS = {"Authorization": "secret", "Proxy-Authorization": "secret", "WWW-Authenticate": "secret"}
DROPPED = {
    "Date": "Thu, 01 Jan 1970 00:00:00 GMT",
    "X-Request-Id": "1",
    "Access-Control-Allow-Origin": "https://a.example",
}


@pytest.mark.scenario_14
@pytest.mark.failure_47
@pytest.mark.parametrize(
    ("listed", "kept", "dropped"),
    [
        (None, KEPT, DROPPED),
        (["X-Receipt"], {"X-Receipt": "7"}, {"Location": "/"}),
        (["X-Shop-*"], {"X-Shop-Order": "1", "x-shop-customer": "2"}, {"X-Shopping": "3", "Location": "/"}),
        (["*"], {"X-Anything": "1"}, {}),
    ],
    ids=["by default", "a list", "a pattern", "everything"],
)
def test_only_listed_headers_are_replayed_and_credentials_never(alice, serve, listed, kept, dropped):
    sent = {**kept, **dropped, **CREDENTIALS}
    serve_answer(serve, lambda: answer_with_cookie(sent), **({} if listed is None else {"recorded_headers": listed}))
    first, replay = replayed(alice)
    assert {name: first[name] for name in sent} == sent
    assert {name: replay[name] for name in kept} == kept
    assert not {*dropped, *CREDENTIALS} & {*replay.headers}
    assert first.cookies["session"].value == "secret"
    assert not replay.cookies
    assert "Content-Length" in replay  # set again by the middleware
    assert "secret" not in json.dumps(list(IdempotencyRecord.objects.values("response_headers", "response_body")))


@pytest.mark.parametrize("debug", [True, False])
def test_a_dropped_header_is_logged_once(alice, serve, settings, caplog, debug):
    settings.DEBUG = debug
    name = f"tests.dropped.{debug}"
    headers = {"X-Dropped": "1", "Location": "/", "Date": "now", "Set-Cookie": "a=b"}
    serve(idempotent(name)(lambda request: HttpResponse(headers=headers)))
    assert [alice.post(key=key)["X-Dropped"] for key in ("k1", "k2")] == ["1", "1"]
    logged = [message for message in caplog.messages if name in message]
    assert ["X-Dropped" in message for message in logged] == [True] * debug


class Titling(MiddlewareMixin):
    def process_template_response(self, request, response):
        response.context_data["title"] = "set"
        return response


def page(text, context):
    return TemplateResponse(None, engines["django"].from_string(text), context, status=201)


@pytest.mark.failure_71
def test_a_template_response_middleware_below_gets_it_unrendered(alice, serve):
    titling = checks_nothing(decorator_from_middleware(Titling))
    serve(idempotent("tests.titled")(titling(lambda request: work(request) and page("title: {{ title }}", {}))))
    first, _ = replayed(alice)
    assert first.content == b"title: set"


@pytest.mark.failure_71
@pytest.mark.parametrize("above", ["middleware", "decorator"])
def test_a_change_above_the_protection_reaches_no_client(alice, serve, settings, above):
    titling = Titling(lambda request: None)
    view = idempotent("tests.late")(lambda request: work(request) and page("title: {{ title }}", {}))
    if above == "middleware":
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Titling"]
    serve(view if above == "middleware" else lambda request: titling.process_template_response(request, view(request)))
    first, _ = replayed(alice)
    assert (first.status_code, first.content) == (201, b"title: ")


def menu():
    root = {"name": "shop", "children": []}
    root["children"].append({"name": "orders", "parent": root})
    return page("{% for child in root.children %}{{ child.parent.name }}{% endfor %}", {"root": root})


def unused_lazy_object():
    def fail():
        raise LookupError("away")

    return page("saved", {"report": SimpleLazyObject(fail)})


def changed_on_commit():
    counts = {"orders": 1}
    transaction.on_commit(lambda: counts.update(orders=2))
    return page("{{ counts.orders }}", {"counts": counts})


def deep():
    data = {}
    for _ in range(600):
        data = {"reply": data}
    return Response(data, status=201)


@pytest.mark.failure_107
@pytest.mark.parametrize("make", [menu, unused_lazy_object, changed_on_commit, deep])
def test_what_a_response_was_rendered_from_is_left_alone(alice, serve, make):
    serve_answer(serve, make, framework="drf" if make is deep else "plain")
    first, _ = replayed(alice)
    assert first.status_code == 201


@pytest.mark.failure_47
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("listed", [None, ["X-Receipt"]])
def test_a_replay_bears_the_language_of_its_body(alice, serve, settings, monkeypatch, listed, own):
    monkeypatch.setattr(translation, "_trans", trans_real)  # as with USE_I18N
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    settings.LANGUAGES = [(code, code) for code in ("de", "fr", "nl")]

    def make():
        headers = {"Content-Language": "nl"} if own else {}
        return HttpResponse(translation.get_language(), headers=headers)

    serve_answer(serve, make, **({} if listed is None else {"recorded_headers": listed}))
    answers = [alice.post(key="k", headers={"Accept-Language": language}) for language in ("de", "fr")]
    assert [answer["Content-Language"] for answer in answers] == ["nl" if own else "de"] * 2
    assert [answer.content for answer in answers] == [b"de", b"de"]


def test_an_adapter_of_a_module_imported_again_keeps_its_position():
    before = list(adapters)
    assert register(before[-1]) is Adapter
    assert adapters == before
