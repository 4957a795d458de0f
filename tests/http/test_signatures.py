"""What a decorated view looks like to schema generators, and to code that asks for its claim."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from rest_framework import serializers, viewsets
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import idempotent, require_claim
from idempotency.contrib.rest_framework import IdempotentMixin
from testproject.authentication import token_required
from tests.http.callers import Caller, effects
from tests.http.serving import Serve
from tests.http.views import drf_answer, plain_answer


class Undocumented(IdempotentMixin, APIView):
    idempotent_operations: ClassVar = {"post": "tests.undocumented"}

    def post(self, request: Request) -> Response:
        return drf_answer(request)


def test_the_mixin_gives_no_view_a_description() -> None:
    assert IdempotentMixin.__doc__ is None
    assert inspect.getdoc(Undocumented) == inspect.getdoc(APIView)
    assert Undocumented().get_view_description() == ""


class EmptySerializer(serializers.Serializer[Any]):
    pass


class Documented(IdempotentMixin, viewsets.GenericViewSet[Any]):
    """What clients read."""

    serializer_class = EmptySerializer
    idempotent_operations: ClassVar = {"create": "tests.documented"}

    def create(self, request: Request) -> Response:
        """Creates one."""
        return drf_answer(request)

    @idempotent("tests.documented_list")
    def list(self, request: Request) -> Response:
        return drf_answer(request)


def test_a_schema_describes_operations_by_their_own_words(settings: Any) -> None:
    generators = pytest.importorskip("drf_spectacular.generators")
    from drf_spectacular.openapi import AutoSchema

    class Silent(Documented):
        schema = AutoSchema()

    Silent.__doc__ = None
    with_schema = type("WithSchema", (Documented,), {"schema": AutoSchema(), "__doc__": Documented.__doc__})
    patterns = [
        path("silent/", type("S", (Undocumented,), {"schema": AutoSchema()}).as_view()),
        path("documented/", with_schema.as_view({"post": "create", "get": "list"})),
    ]
    schema = generators.SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)
    assert "description" not in schema["paths"]["/silent/"]["post"]
    assert schema["paths"]["/documented/"]["post"]["description"] == "Creates one."
    assert schema["paths"]["/documented/"]["get"]["description"] == "What clients read."


@pytest.mark.django_db(transaction=True)
def test_a_handler_asks_for_its_claim(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.claim")
    def view(request: HttpRequest) -> HttpResponse:
        return JsonResponse({"attempt": require_claim().attempt})

    serve(view)
    assert alice.post(key="k").json() == {"attempt": 1}
    with pytest.raises(RuntimeError, match=r"require_claim\(\) was called outside of a protected operation"):
        require_claim()


@pytest.mark.django_db(transaction=True)
def test_the_route_is_read_only_for_a_key(alice: Caller, settings: Any) -> None:
    class Unreadable:
        """A converter's object, of which nothing can be read without an error."""

        def __str__(self) -> str:
            raise ValueError

    @idempotent("tests.route", required=False)
    def view(request: HttpRequest, value: object) -> HttpResponse:
        return plain_answer(request)

    settings.ROOT_URLCONF = (path("", token_required(view), {"value": Unreadable()}),)
    assert alice.post().status_code == 201
    assert alice.post(key="k").status_code == 500
    assert effects() == 1
