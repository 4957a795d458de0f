"""How the query, the route, the method and the headers count when two requests are compared."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import path, re_path, register_converter

from idempotency import idempotent
from testproject.authentication import token_required
from tests.factories import UserFactory
from tests.http.callers import Caller, Same, effects, records
from tests.http.serving import Framework
from tests.http.views import plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.scenario_16, pytest.mark.once]


@pytest.mark.failure_41
@pytest.mark.failure_46
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("/?dry=1", "/", False),
        ("/?dry=1", "/?dry=2", False),
        ("/?a=1&b=2", "/?b=2&a=1", True),  # which spellings are one query: ``tests/unit/fingerprint/test_payload.py``
        ("/?a=b%26c", "/?a=b&c", False),
        ({"method": "POST"}, {"method": "PATCH"}, False),
        ({"headers": {"User-Agent": "a", "X-Request-Id": "1"}}, {"headers": {"User-Agent": "b"}}, True),
    ],
)
def test_query_and_method_count(same: Same, framework: Framework, first: Any, second: Any, expected: bool) -> None:
    framework.serve()
    assert same(first, second) == expected


def test_another_route_argument_is_another_payload(same: Same, framework: Framework, settings: Any) -> None:
    view = framework.view(lambda request, **route: work(request), idempotent("tests.route"))
    if framework.name == "plain":
        view = token_required(view)
    settings.ROOT_URLCONF = (path("users/<int:user>/orders/<str:order>/", view),)
    assert not same("/users/1/orders/2/", "/users/2/orders/1/")
    assert not same("/users/1/orders/2/", "/users/1/orders/3/")
    assert not same("/users/1/orders/11/", "/users/11/orders/1/")


class Seat:
    """What a converter may make of a path, without a text of its own."""

    def __init__(self, number: str) -> None:
        self.number = number


class NamedSeat(Seat):
    def __str__(self) -> str:
        return f"seat {self.number}"


def converter(make: Any) -> str:
    name = f"routes_{make.__name__}"
    register_converter(type(name, (), {"regex": "[0-9]+", "to_python": lambda self, value: make(value)}), name)
    return name


def user(value: str) -> User:
    return User.objects.get(pk=value)


def seats(value: str) -> Any:
    return [Seat(value)]


SEAT, SEATS, NAMED, USER = map(converter, (Seat, seats, NamedSeat, user))


def serve_at(settings: Any, pattern: Any) -> None:
    make = re_path if pattern.startswith("^") else path
    view = idempotent("tests.converted")(lambda request, *args, **route: plain_answer(request))
    settings.ROOT_URLCONF = (make(pattern, token_required(view)),)


@pytest.mark.parametrize("pattern", ["^([0-9]+)/$", f"<{USER}:payee>/", f"<{NAMED}:seat>/"])
def test_a_route_argument_of_any_type_counts(same: Same, settings: Any, pattern: str) -> None:
    serve_at(settings, pattern)
    first, second = UserFactory().pk, UserFactory().pk
    assert same(f"/{first}/", f"/{first}/")
    assert not same(f"/{first}/", f"/{second}/")


@pytest.mark.parametrize("kind", [SEAT, SEATS])
def test_a_route_argument_without_a_text_of_its_own_is_refused_with_the_remedy(
    alice: Caller, settings: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Its text is an address in memory, by which an honest retry would be another request."""
    serve_at(settings, f"<{kind}:seat>/")
    for _ in range(2):
        assert alice.post("/1/", key="k").status_code == 500
    assert "Give the type a __str__" in caplog.text
    assert (effects(), records()) == (0, [])


def test_the_route_is_read_only_for_a_key(alice: Caller, settings: Any) -> None:
    class Unreadable:
        """A converter's object, of which nothing can be read without an error."""

        def __str__(self) -> str:
            raise ValueError

    view = idempotent("tests.route", required=False)(lambda request, value: plain_answer(request))
    settings.ROOT_URLCONF = (path("", token_required(view), {"value": Unreadable()}),)
    assert alice.post().status_code == 201
    assert alice.post(key="k").status_code == 500
    assert effects() == 1
