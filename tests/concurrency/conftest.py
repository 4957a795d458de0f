"""An account, and a client that several threads may use at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from tests.concurrency.urls import handler, reconciler

Post = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_handler() -> Iterator[None]:
    handler.reset()
    reconciler.reset()
    yield
    handler.reset()
    reconciler.reset()


@pytest.fixture
def account(transactional_db: None) -> str:
    return str(get_user_model().objects.create(username="alice").pk)


@pytest.fixture
def post(account: str) -> Post:
    def post(path: str = "/inside/", key: str = "k", label: str = "one", account: str = account) -> Any:
        return Client(raise_request_exception=False).post(
            path,
            {"label": label},
            content_type="application/json",
            headers={"Idempotency-Key": key, "X-Account": account},
        )

    return post
