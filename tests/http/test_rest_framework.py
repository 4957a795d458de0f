"""DRF views and packages get DRF's own calls, types, attributes and representations."""

import json

import pytest
from django.http import HttpResponse
from rest_framework import exceptions, renderers
from rest_framework.exceptions import ErrorDetail
from rest_framework.renderers import AdminRenderer, BrowsableAPIRenderer, JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler

from idempotency import idempotent, require_claim
from idempotency.contrib.rest_framework import IdempotencyAPIException, IdempotentMixin
from idempotency.exceptions import InProgressError, KeyReusedError
from tests.http.callers import effects, problem_code, replayed
from tests.http.serving import Framework, drf_view, serve_answer
from tests.http.views import CrashError, MethodAPIView, MixinAPIView, drf_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

PAGE = {"Accept": "text/html"}


def test_our_errors_have_drfs_types():
    exception = IdempotencyAPIException(KeyReusedError())
    assert (type(exception.detail), type(exception.__cause__)) == (ErrorDetail, KeyReusedError)
    assert exception.detail.code == exception.get_codes() == "idempotency_key_reused"
    assert exception.get_full_details() == {"message": str(exception), "code": "idempotency_key_reused"}
    assert exception.status_code == 422
    assert IdempotencyAPIException(InProgressError(retry_after=3)).wait == 3


def adding_handler(error, context):
    """The example in DRF's documentation."""
    response = exception_handler(error, context)
    if response is not None:
        response.data["status_code"] = response.status_code
    return response


@pytest.mark.failure_73
def test_an_exception_handler_that_adds_a_member_adds_it_to_the_problem(alice, serve, settings):
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "EXCEPTION_HANDLER": f"{__name__}.adding_handler"}
    Framework("drf", serve).serve()
    refused = alice.post()
    assert refused["Content-Type"] == "application/problem+json"
    problem = json.loads(refused.content)
    assert problem.pop("status_code") == 400
    assert problem.keys() == {"type", "title", "status", "detail", "code", "retryable"}
    assert problem["code"] == "idempotency_key_missing"


class Noting(IdempotentMixin, APIView):
    """Records each call of ``finalize_response``, where a project may write an audit row."""

    idempotent_operations = {"post": "tests.noting"}
    finalized = []  # replaced in each test

    def post(self, request):
        if "error" in request.GET:
            raise getattr(exceptions, request.GET["error"])
        return drf_answer(request)

    def finalize_response(self, request, response, *args, **kwargs):
        final = super().finalize_response(request, response, *args, **kwargs)
        self.finalized.append(final.status_code)
        return final


@pytest.fixture
def finalized(monkeypatch):
    statuses = []
    monkeypatch.setattr(Noting, "finalized", statuses)
    return statuses


@pytest.mark.failure_71
def test_a_response_is_finalized_once(alice, serve, finalized):
    serve(Noting.as_view())
    assert alice.post(key="k").status_code == 201
    assert finalized == [201]
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert finalized == [201, 201]
    assert alice.post().status_code == 400
    for url, status in (("/?status=503", 503), ("/?error=NotFound", 404), ("/?error=Throttled", 429)):
        assert alice.post(url, key=url).status_code == status
    assert finalized[2:] == [400, 503, 404, 429]


@pytest.mark.failure_71
def test_an_override_adds_headers_but_its_late_data_reaches_no_client(alice, serve):
    class Empty(APIView):
        @idempotent("tests.empty", rebuild=lambda reference, request: Response(status=204))
        def delete(self, request):
            drf_answer(request)
            require_claim().reference = request.GET.get("reference")
            return Response(status=204)

    class Changing(Empty):
        def delete(self, request):
            response = super().delete(request)
            response["X-Extra"] = "1"
            response.data = {"extra": 1}
            return response

    serve(Changing.as_view())
    for url in ("/", "/?reference=1"):
        first, replay = replayed(alice, url, method="DELETE", key=url)
        assert (first["X-Extra"], first.content) == (replay["X-Extra"], replay.content) == ("1", b"")


@pytest.mark.parametrize("raised", [exceptions.NotFound, ZeroDivisionError])
def test_an_override_may_raise_another_error(alice, serve, raised):
    class Translating(MethodAPIView):
        def post(self, request):
            try:
                return super().post(request)
            except CrashError as error:
                raise raised from error

        def get_exception_handler(self):
            def handle(error, context):
                seen.append(type(error))
                return exception_handler(error, context)

            return handle

    seen = []
    serve(Translating.as_view())
    assert alice.post("/?crash=1", key="k").status_code == (404 if raised is exceptions.NotFound else 500)
    assert (seen, effects()) == ([CrashError, raised], 0)


class TextRenderer(renderers.BaseRenderer):
    media_type, format, charset = "text/plain", "txt", "utf-8"

    def render(self, data, *args, **kwargs):
        return str(data)


BROKEN_JSON = type("BrokenJSONRenderer", (TextRenderer,), {"media_type": "application/json"})


@pytest.mark.failure_72
@pytest.mark.parametrize(
    ("answer", "renderer", "is_drf"),
    [
        (lambda: Response({"a": 1}, status=400), JSONRenderer, True),
        (lambda: Response(status=204), JSONRenderer, True),
        (lambda: Response("plain", status=200), TextRenderer, False),
        (lambda: Response("{oops", status=200), BROKEN_JSON, False),
        (lambda: HttpResponse("<p>", status=200), JSONRenderer, False),
        (lambda: HttpResponse(b"", status=200), JSONRenderer, False),
    ],
    ids=["json", "empty", "text", "broken json", "a plain response", "an empty plain response"],
)
def test_a_replay_has_its_data_if_the_body_is_json(alice, serve, answer, renderer, is_drf):
    serve_answer(serve, answer, framework="drf", renderers=[renderer])
    first, replay = replayed(alice)
    assert replay.get("Content-Type") == first.get("Content-Type")
    assert isinstance(replay, Response) == is_drf
    if is_drf:
        assert (replay.data, replay.is_rendered) == (first.data, True)
        assert replay.exception == (replay.status_code >= 400)
        assert type(replay.accepted_renderer) is type(first.accepted_renderer)
        assert type(replay.renderer_context["view"]) is type(first.renderer_context["view"])


def serve_with(serve, *classes):
    serve(drf_view(idempotent("tests.page")(drf_answer), renderers=classes))


@pytest.mark.parametrize(("page_renderer", "status"), [(BrowsableAPIRenderer, 201), (AdminRenderer, 303)])
def test_a_page_of_the_browsable_api_is_recorded_as_its_data(alice, serve, page_renderer, status):
    serve_with(serve, JSONRenderer, page_renderer)
    first = alice.post(key="k", headers=PAGE)
    assert (first.status_code, first["Content-Type"].partition(";")[0]) == (status, "text/html")
    for headers in ({"Accept": "application/json"}, PAGE):
        replay = alice.post(key="k", headers=headers)
        assert (replay.status_code, replay["Content-Type"]) == (201, "application/json")
        assert json.loads(replay.content)["operation"] == "tests.page"
        assert replay["Location"].startswith("/transfers/")
    assert effects() == 1


def test_a_view_with_the_browsable_api_only_replays_its_page(alice, serve):
    serve_with(serve, BrowsableAPIRenderer)
    _, replay = replayed(alice, headers=PAGE)
    assert replay["Content-Type"].startswith("text/html")


def test_an_error_on_the_browsable_api_is_shown_on_its_page(alice, serve):
    """The page's form can't send the header, so the page shows the error."""
    serve_with(serve, JSONRenderer, BrowsableAPIRenderer)
    refused = alice.post(headers=PAGE)
    assert (refused.status_code, b"idempotency_key_missing" in refused.content) == (400, True)
    assert refused["Content-Type"].startswith("text/html")
    assert problem_code(alice.post()) == "idempotency_key_missing"


def test_an_error_raised_while_rendering_a_page_is_recorded_instead(alice, serve):
    class FailingPage(BrowsableAPIRenderer):
        def render(self, data, *args, **kwargs):
            if "id" in data:
                raise exceptions.NotFound
            return super().render(data, *args, **kwargs)

    serve_with(serve, JSONRenderer, FailingPage)
    assert alice.post(key="k", headers=PAGE).status_code == 404
    replay = alice.post(key="k")
    assert (replay.status_code, json.loads(replay.content)) == (404, {"detail": "Not found."})
    assert effects() == 0


def test_a_schema_never_describes_operations_by_the_mixins_docstring():
    assert MixinAPIView().get_view_description() == ""
