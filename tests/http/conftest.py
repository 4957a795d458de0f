"""Callers, and a way to put views in front of them. Tests here commit for real, so each of their files says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.cache import cache
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from testproject.authentication import token_required
from tests.factories import UserFactory
from tests.http.callers import Caller, Serve
from tests.http.sameness import Same
from tests.http.views import drf_answer, plain_answer, work
from tests.operations import forgetting_operations


@pytest.fixture(params=["wsgi", "asgi"])
def transport(request: pytest.FixtureRequest) -> str:
    """Both of Django's handlers, for a test that asks for it."""
    name: str = request.param
    return name


@pytest.fixture
def alice(db: None) -> Caller:
    return Caller(UserFactory(username="alice"))


@pytest.fixture
def bob(db: None) -> Caller:
    return Caller(UserFactory(username="bob"))


@pytest.fixture
def anonymous(db: None) -> Caller:
    return Caller(None)


@pytest.fixture(autouse=True)
def _forget_operations() -> Iterator[None]:
    """Forget what a test declares, so that the next one may use the name. The views' modules keep theirs."""
    with forgetting_operations():
        yield


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    """DRF's throttles count in it."""
    cache.clear()


@pytest.fixture
def serve(settings: Any) -> Serve:
    """Serve views: ``serve(view)`` at ``/``, ``serve(view, **{"a/": other})`` others beside it.

    Plain views get their caller from the token; DRF views, which authenticate by themselves, are served as they are.
    """

    def serve(view: Any = None, **others: Any) -> None:
        views = {**({} if view is None else {"": view}), **others}
        settings.ROOT_URLCONF = tuple(path(route, _authenticated(served)) for route, served in views.items())

    return serve


def _authenticated(view: Any) -> Any:
    return view if hasattr(getattr(view, "cls", None), "handle_exception") else csrf_exempt(token_required(view))


@pytest.fixture
def urls(settings: Any) -> None:
    """The views of ``tests.http.views``, at the paths of ``tests.http.urls``."""
    settings.ROOT_URLCONF = "tests.http.urls"


@pytest.fixture
def atomic_requests() -> Iterator[None]:
    """ATOMIC_REQUESTS on the record's database. Every connection to it shares this dictionary."""
    before = connection.settings_dict["ATOMIC_REQUESTS"]
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    yield
    connection.settings_dict["ATOMIC_REQUESTS"] = before


def _serve_plain(serve: Serve, **policy: Any) -> None:
    serve(idempotent("tests.plain", **policy)(plain_answer))


def _serve_drf(serve: Serve, **policy: Any) -> None:
    serve(api_view(["POST", "PATCH"])(idempotent("tests.drf", **policy)(drf_answer)))


@pytest.fixture(params=[_serve_plain, _serve_drf], ids=["plain", "drf"])
def serve_operation(request: pytest.FixtureRequest, serve: Serve) -> Callable[..., None]:
    """Serve one operation at ``/``, under the policy given: as a plain view, and as a DRF view."""
    return lambda **policy: request.param(serve, **policy)


@pytest.fixture(params=["plain", "drf"])
def serve_parsing(request: pytest.FixtureRequest, serve: Serve) -> Callable[..., None]:
    """Serve an operation that takes JSON, forms and uploads: as a plain view, and as a DRF view."""

    @idempotent("tests.plain_payload")
    def plain(request: HttpRequest) -> HttpResponse:
        return plain_answer(request)

    @api_view(["POST", "PATCH"])
    @parser_classes([JSONParser, FormParser, MultiPartParser])
    @idempotent("tests.drf_payload")
    def drf(request: Request) -> Response:
        answer, status = work(request)
        return Response(answer, status=status)

    return lambda: serve(plain if request.param == "plain" else drf)


@pytest.fixture
def same(alice: Caller) -> Same:
    return Same(alice)
