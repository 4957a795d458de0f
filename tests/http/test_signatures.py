"""What a decorated view looks like to type checkers, to schema generators, and to code that asks for its claim."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
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
from tests.http.callers import Caller, Serve, effects
from tests.http.views import drf_answer, plain_answer

TYPED = """
from typing import Any

from django.http import HttpRequest, JsonResponse
from django.views import View
from rest_framework.request import Request
from rest_framework.response import Response
from typing_extensions import assert_type

from idempotency import idempotent, require_claim


@idempotent("typed.function")
def pay(request: HttpRequest, amount: int, *, note: str = "") -> JsonResponse:
    assert_type(require_claim().attempt, int)
    return JsonResponse({})


@idempotent("typed.async")
async def pay_later(request: HttpRequest) -> JsonResponse:
    return JsonResponse({})


class Method(View):
    @idempotent("typed.method")
    def post(self, request: HttpRequest, pk: int) -> JsonResponse:
        return JsonResponse({})


def use(request: HttpRequest) -> None:
    assert_type(pay(request, 1, note="a"), JsonResponse)
    assert_type(Method().post(request, pk=1), JsonResponse)
    pay(request, "1")  # wrong
    pay(request, 1, remark="a")  # wrong
    Method().post(request)  # wrong


async def use_async(request: HttpRequest) -> None:
    assert_type(await pay_later(request), JsonResponse)
"""


@pytest.mark.timeout(300)
def test_a_decorated_view_keeps_its_signature(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="in the environment that checks types")
    sample = tmp_path / "sample.py"
    sample.write_text(TYPED)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", "--no-pretty", str(sample)],
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = [number for number, line in enumerate(TYPED.splitlines(), start=1) if line.endswith("# wrong")]
    reported = [int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line]
    assert reported == wrong, checked.stdout + checked.stderr


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

    def handler(request: HttpRequest, value: object) -> HttpResponse:
        return plain_answer(request)

    settings.ROOT_URLCONF = (
        path("", idempotent("tests.route", required=False, account=lambda request: "a")(_as(alice, handler))),
    )
    settings.ROOT_URLCONF[0].default_args["value"] = Unreadable()
    assert alice.post().status_code == 201
    assert alice.post(key="k").status_code == 500
    assert effects() == 1


def _as(caller: Caller, handler: Any) -> Any:
    def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        assert caller.user is not None
        request.user = caller.user
        response: HttpResponse = handler(request, **kwargs)
        return response

    return view
