"""A change to a response after its rendering is refused. A change to a replay has no effect."""

import functools
import re

import pytest
from asgiref.sync import sync_to_async
from django.template import engines
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.utils.decorators import decorator_from_middleware
from django.utils.deprecation import MiddlewareMixin
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.renderers import JSONRenderer, StaticHTMLRenderer
from rest_framework.views import APIView

from idempotency import checks_nothing, idempotent
from tests.http.callers import records, replayed
from tests.http.serving import drf_view
from tests.http.views import drf_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


class Titling(MiddlewareMixin):
    def process_template_response(self, request, response):
        response.context_data["title"] = "rendered" if response.is_rendered else "set"
        return response


@pytest.mark.failure_71
def test_template_response_middleware_gets_the_unrendered_response(alice, serve):
    titling = checks_nothing(decorator_from_middleware(Titling))

    @serve
    @idempotent("tests.titled")
    @titling
    def view(request):
        work(request)
        return SimpleTemplateResponse(engines["django"].from_string("title: {{ title }}"), {})

    first, replay = replayed(alice)
    assert first.content == replay.content == b"title: set"


def work_and_show(request):
    work(request)
    return show(request)


class Showing(View):
    @idempotent("declarations.showing")
    def post(self, request):
        return work_and_show(request)


class ShowingLater(View):
    @idempotent("declarations.later")
    async def post(self, request):
        await sync_to_async(work)(request)
        return show(request)


class ShowingByDRF(APIView):
    @idempotent("declarations.showing_by_drf")
    def post(self, request):
        return work_and_show(request)


def show(request):
    return TemplateResponse(request, engines["django"].from_string("{{ title }}"), {"list": []}, status=201)


CHANGES = {
    "add a variable": lambda response: response.context_data.update(title="late"),
    "add to a list": lambda response: response.context_data["list"].append("late"),
    "replace the context": lambda response: setattr(response, "context_data", {"title": "late"}),
    "nothing": lambda response: response.context_data["list"],
}


def changing(view, change):
    """A decorator above the protection."""

    @functools.wraps(view)
    def wrapper(request, *args):
        response = view(request, *args)
        CHANGES[change](response)
        return response

    return wrapper


def overriding(base, change):
    """A class whose handler calls the protected one."""

    def post(self, request):
        response = base.post(self, request)
        CHANGES[change](response)
        return response

    async def post_later(self, request):
        response = await base.post(self, request)
        CHANGES[change](response)
        return response

    return type("Changing", (base,), {"post": post_later if base is ShowingLater else post}).as_view()


SHOWN = {
    "function": lambda change: changing(idempotent("declarations.function")(work_and_show), change),
    "api_view": lambda change: api_view(["POST"])(changing(idempotent("declarations.api_view")(work_and_show), change)),
    "as_view": lambda change: changing(Showing.as_view(), change),
    "class": lambda change: overriding(Showing, change),
    "async class": lambda change: overriding(ShowingLater, change),
    "APIView": lambda change: overriding(ShowingByDRF, change),
}


@pytest.mark.failure_71
@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("change", CHANGES)
def test_a_context_changed_after_its_rendering_is_refused(alice, serve, caplog, kind, change):
    serve(SHOWN[kind](change))
    answer = alice.post(key="k")
    assert records() == [("completed", 1)]
    if change == "nothing":
        assert answer.status_code == 201
    else:
        assert answer.status_code == 500
        assert re.search("The context_data of the response of Operation '.*' was changed after", caplog.text)


@pytest.mark.failure_71
@pytest.mark.parametrize("kind", SHOWN)
def test_a_change_to_a_replays_context_has_no_effect(alice, serve, kind):
    serve(SHOWN[kind]("add a variable"))
    alice.post(key="k")
    replay = alice.post(key="k")
    assert (replay.status_code, replay.content, replay["Idempotency-Replayed"]) == (201, b"", "true")


@pytest.mark.failure_71
def test_a_context_that_a_middleware_changes_is_refused(alice, serve, settings, caplog):
    serve(idempotent("declarations.titled")(work_and_show))
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Titling"]
    assert [alice.post(key="k").status_code for _ in range(2)] == [500, 201]
    assert "of the response of Operation 'declarations.titled' was changed" in caplog.text


@pytest.mark.failure_71
@pytest.mark.parametrize("is_json", [True, False])
def test_data_that_a_decorator_above_changes_is_refused(alice, serve, caplog, is_json):
    def stamping(view):
        def wrapper(request):
            response = view(request)
            response.data["late"] = True
            return response

        return wrapper

    renderers = [JSONRenderer] if is_json else [StaticHTMLRenderer]
    serve(stamping(drf_view(idempotent("declarations.stamped")(drf_answer), renderers=renderers)))
    assert alice.post(key="k").status_code == 500
    assert "The data of the response of Operation 'declarations.stamped' was changed" in caplog.text
    assert alice.post(key="k").status_code == 201


def test_an_override_may_answer_with_another_template(alice, serve):
    class Another(Showing):
        def post(self, request):
            CHANGES["add a variable"](super().post(request))
            return show(request)

    serve(Another.as_view())
    assert alice.post(key="k").status_code == 201
