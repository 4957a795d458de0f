"""Callers, and a way to put views in front of them. Tests here commit for real, so each of their files says so."""

from functools import partial

import pytest
from django.core.cache import cache
from django.db import connection
from django.urls import path

from tests.factories import UserFactory
from tests.http.callers import Caller, is_same
from tests.http.serving import Framework, served
from tests.operations import forgetting_operations


@pytest.fixture
def alice(db):
    return Caller(UserFactory(username="alice"))


@pytest.fixture(params=["wsgi", "asgi"])
def transport(request, alice):
    """How the requests of alice arrive."""
    alice.transport = request.param
    return request.param


@pytest.fixture
def bob(db):
    return Caller(UserFactory(username="bob"))


@pytest.fixture
def anonymous(db):
    return Caller(None)


@pytest.fixture(autouse=True)
def _forget_operations():
    """Forget what a test declares, so that the next one may use the name. The views' modules keep theirs."""
    with forgetting_operations():
        yield


@pytest.fixture(autouse=True)
def _empty_cache():
    """DRF's throttles count in it."""
    cache.clear()


@pytest.fixture
def serve(settings):
    """Serve views: ``serve(view)``, or a view under ``@serve``, at ``/``, and ``**{"a/": other}`` beside it."""

    def serve(view=None, **others):
        views = {**({} if view is None else {"": view}), **others}
        settings.ROOT_URLCONF = tuple(path(route, served(each)) for route, each in views.items())
        return view

    return serve


@pytest.fixture
def middleware(settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "idempotency.middleware.IdempotencyMiddleware"]


@pytest.fixture
def atomic_requests(monkeypatch):
    """ATOMIC_REQUESTS on the record's database. Every connection to it shares this dictionary."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)


@pytest.fixture(params=[False, True], ids=["", "ATOMIC_REQUESTS"])
def atomic(request):
    if request.param:
        request.getfixturevalue("atomic_requests")
    return request.param


@pytest.fixture(params=["plain", "drf"])
def framework(request, serve):
    return Framework(request.param, serve)


@pytest.fixture
def same(alice):
    return partial(is_same, alice)
