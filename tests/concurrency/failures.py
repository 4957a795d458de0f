"""What handlers and stores do in trouble, and how an answer names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError


def fail(request: Any = None) -> None:
    raise RuntimeError("on purpose")


def unreachable(*args: Any, **kwargs: Any) -> Any:
    raise OperationalError("server closed the connection unexpectedly")


@contextmanager
def failing_database(owner: Any, *names: str) -> Iterator[None]:
    """In the block these functions find the database out of reach."""
    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(owner, name, unreachable)
        yield


def problem(answer: Any) -> tuple[int, str]:
    """Status and code of an answer that is a problem."""
    assert answer["Content-Type"] == "application/problem+json"
    return answer.status_code, str(answer.json()["code"])


UNAVAILABLE = (503, "idempotency_unavailable")
IN_PROGRESS = (409, "idempotency_in_progress")
UNKNOWN = (409, "idempotency_outcome_unknown")
