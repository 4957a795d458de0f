"""The protected views in ``urls``, an account, and a client that several threads can use at once."""

import threading

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from idempotency.protocol import renewal
from idempotency.protocol.faults import fault_point
from tests.concurrency.traces import abandon, end_lease
from tests.concurrency.urls import handler


@pytest.fixture(autouse=True)
def _fresh_handler(settings):
    settings.ROOT_URLCONF = "tests.concurrency.urls"
    handler.reset()
    yield
    handler.reset()


@pytest.fixture
def account(transactional_db):
    return str(get_user_model().objects.create(username="alice").pk)


@pytest.fixture
def post(account):
    def post(path="/inside/", key="k", label="one", account=account):
        return Client(raise_request_exception=False).post(
            path,
            {"label": label},
            content_type="application/json",
            headers={"Idempotency-Key": key, "X-Account": account},
        )

    return post


@pytest.fixture
def cut_off(post):
    """Leave a record as a killed process does, after its lease."""

    def cut_off(path):
        post(path)
        abandon()
        end_lease()
        handler.reset()

    return cut_off


@pytest.fixture
def often(monkeypatch):
    """A heartbeat renews several times a second, so a lease doesn't end before its next renewal."""
    monkeypatch.setattr(renewal, "RENEWALS_A_LEASE", 300)


@pytest.fixture
def renewals(monkeypatch):
    """Released before each renewal by a heartbeat."""
    renewals = threading.Semaphore(0)
    monkeypatch.setitem(fault_point, "heartbeat.before", renewals.release)
    return renewals
