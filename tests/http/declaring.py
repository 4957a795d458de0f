"""What the tests of declarations share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from rest_framework.response import Response

from tests.http.callers import Caller, effects
from tests.http.views import drf_answer

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@contextmanager
def refused(match: str) -> Iterator[None]:
    """The block is refused as a wrong declaration. Before Python 3.12 ``__set_name__`` has its errors wrapped."""
    with pytest.raises((ImproperlyConfigured, RuntimeError)) as raised:
        yield
    error = raised.value if isinstance(raised.value, ImproperlyConfigured) else raised.value.__cause__
    assert isinstance(error, ImproperlyConfigured)
    assert match in str(error)


def runs_once(alice: Caller, method: str, url: str = "/") -> bool:
    """Whether a request and its retry take effect once, and a request without a key doesn't."""
    before = effects()
    answers = [alice.request(method, url, key="k") for _ in range(2)]
    assert {answer.status_code for answer in answers} == {201}
    alice.request(method, url)
    return effects() == before + 1 and answers[1].content == answers[0].content


class Writing:
    """Two handlers without protection, to put before or behind what protects them."""

    def post(self, request: Any) -> Response:
        return drf_answer(request)

    put = post
