"""Callers, and fixtures that serve views to them. Tests here commit, so each file sets ``transaction=True``."""

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
    """The protocol by which alice's requests arrive."""
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
    """Forget a test's operations, so that the next test may reuse their names. Operations of ``views`` are kept."""
    with forgetting_operations():
        yield


@pytest.fixture(autouse=True)
def _empty_cache():
    """DRF's throttles count in the cache."""
    cache.clear()


@pytest.fixture
def serve(settings):
    """Serve views: ``serve(view)`` or ``@serve`` at ``/``, and others by route: ``serve(**{"a/": other})``."""

    def serve(view=None, **others):
        views = {**({} if view is None else {"": view}), **others}
        settings.ROOT_URLCONF = tuple(path(route, served(each)) for route, each in views.items())
        return view

    return serve


@pytest.fixture
def middleware(settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "idempotency.http.middleware.IdempotencyMiddleware"]


@pytest.fixture
def atomic_requests(monkeypatch):
    """ATOMIC_REQUESTS on the records' database. Every connection to it shares this dictionary."""
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
