"""What the tests of declarations share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency import Operation, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from tests.http.callers import Caller, effects
from tests.http.views import Methods, drf_answer, plain_answer

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
WAYS = ["decorator", "mixin"]


class EveryMethod:
    def get(self, request: Any) -> Any:
        return plain_answer(request)

    post = put = patch = delete = get


class Declaring(IdempotentMixin):
    """A mixin of the project's own, which passes the protection on."""

    idempotent_operations: ClassVar = {"post": "tests.declaring"}


class Creating:
    """A mixin of the project's own with a decorated method."""

    @idempotent("declarations.creating")
    def post(self, request: Any) -> Any:
        return drf_answer(request)

    put = Methods.put


@contextmanager
def refused(match: str) -> Iterator[None]:
    """The block is refused as a wrong declaration. Before Python 3.12 ``__set_name__`` has its errors wrapped."""
    with pytest.raises((ImproperlyConfigured, RuntimeError)) as raised:
        yield
    error = raised.value if isinstance(raised.value, ImproperlyConfigured) else raised.value.__cause__
    assert isinstance(error, ImproperlyConfigured)
    assert match in str(error)


def protecting(way: str, base: Any, operations: Mapping[str, str | Operation]) -> Any:
    if way == "mixin":
        return type(base.__name__, (IdempotentMixin, base), {"idempotent_operations": operations})
    return type(
        base.__name__, (base,), {name: idempotent(each)(getattr(base, name)) for name, each in operations.items()}
    )


def runs_once(alice: Caller, method: str, url: str = "/") -> bool:
    """Whether a request and its retry take effect once, and a request without a key doesn't."""
    before, key = effects(), str(uuid4())
    answers = [alice.request(method, url, key=key) for _ in range(2)]
    assert {answer.status_code for answer in answers} == {201}
    alice.request(method, url)
    return effects() == before + 1 and answers[1].content == answers[0].content
