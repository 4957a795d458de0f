"""Callers, and a way to put views in front of them. Tests here commit for real, so each of their files says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.cache import cache
from django.db import connection
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from testproject.authentication import token_required
from tests.factories import UserFactory
from tests.http.callers import Caller, Same
from tests.http.serving import Framework, Serve
from tests.operations import forgetting_operations


@pytest.fixture(params=["wsgi", "asgi"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    """Serve views: ``serve(view)``, or a view under ``@serve``, at ``/``, and ``**{"a/": other}`` beside it.

    Plain views get their caller from the token; DRF views, which authenticate by themselves, are served as they are.
    """

    def serve(view: Any = None, **others: Any) -> Any:
        views = {**({} if view is None else {"": view}), **others}
        settings.ROOT_URLCONF = tuple(path(route, _authenticated(served)) for route, served in views.items())
        return view

    return serve


def _authenticated(view: Any) -> Any:
    return view if hasattr(getattr(view, "cls", None), "handle_exception") else csrf_exempt(token_required(view))


@pytest.fixture
def middleware(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "idempotency.http.middleware.IdempotencyMiddleware"]


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATOMIC_REQUESTS on the record's database. Every connection to it shares this dictionary."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)


@pytest.fixture(params=[False, True], ids=["", "ATOMIC_REQUESTS"])
def atomic(request: pytest.FixtureRequest) -> bool:
    if request.param:
        request.getfixturevalue("atomic_requests")
    return bool(request.param)


@pytest.fixture(params=["plain", "drf"])
def framework(request: pytest.FixtureRequest, serve: Serve) -> Framework:
    return Framework(request.param, serve)


@pytest.fixture
def same(alice: Caller) -> Same:
    return Same(alice)
