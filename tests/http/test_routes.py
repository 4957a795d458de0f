"""How the query, the route and the method count when two requests are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import JsonResponse
from django.urls import path, re_path, register_converter
from rest_framework.decorators import api_view
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.authentication import token_required
from tests.factories import UserFactory
from tests.http.callers import FORM, Caller, effects
from tests.http.sameness import Same
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.scenario(16)
def test_another_query_string_is_another_payload(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"url": "/?dry=1"}, {"url": "/"})
    assert not same({"url": "/?dry=1"}, {"url": "/?dry=2"})
    assert not same({"url": "/?a=1&a=2"}, {"url": "/?a=2&a=1"})
    assert same({"url": "/?a=1&b=2"}, {"url": "/?b=2&a=1"})


@pytest.mark.scenario(16)
def test_the_order_of_one_name_counts_however_it_is_spelled(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"url": "/?a=2&%61=1"}, {"url": "/?%61=1&a=2"})
    form = {"content_type": FORM}
    assert not same({"data": b"a=2&%61=1", **form}, {"data": b"%61=1&a=2", **form})


@pytest.mark.failure_mode(41)
def test_queries_that_read_alike_when_joined_differ(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"url": "/?a=&a=b&c="}, {"url": "/?a=&b=c&b="})
    assert not same({"url": "/?a=b%26c"}, {"url": "/?a=b&c"})
    assert not same({"url": "/?a=b%3Dc"}, {"url": "/?a%3Db=c"})


@pytest.mark.scenario(16)
@pytest.mark.parametrize("framework", ["plain", "drf"])
def test_another_route_argument_is_another_payload(same: Same, settings: Any, framework: str) -> None:
    def answer(request: Any, **route: Any) -> Any:
        body, status = work(request)
        return Response(body, status=status) if framework == "drf" else JsonResponse(body, status=status)

    if framework == "drf":
        view: Any = api_view(["POST"])(idempotent("tests.route")(answer))
    else:
        view = token_required(idempotent("tests.route")(answer))
    settings.ROOT_URLCONF = (
        path("users/<int:user>/orders/<str:order>/", view),
        path("flats/<str:order>/<int:user>/", view),
    )
    assert same({"url": "/users/1/orders/2/"}, {"url": "/users/1/orders/2/"})
    assert not same({"url": "/users/1/orders/2/"}, {"url": "/users/2/orders/1/"})
    assert not same({"url": "/users/1/orders/2/"}, {"url": "/users/1/orders/3/"})
    assert not same({"url": "/users/1/orders/11/"}, {"url": "/users/11/orders/1/"})


@pytest.mark.scenario(16)
def test_positional_route_arguments_count(same: Same, settings: Any) -> None:
    view = token_required(idempotent("tests.positional")(lambda request, *args: plain_answer(request)))
    settings.ROOT_URLCONF = (re_path("^orders/([0-9]+)/([0-9]+)/$", view),)
    assert same({"url": "/orders/1/2/"}, {"url": "/orders/1/2/"})
    assert not same({"url": "/orders/1/2/"}, {"url": "/orders/2/1/"})


class UserConverter:
    regex = "[0-9]+"

    def to_python(self, value: str) -> User:
        return User.objects.get(pk=value)

    def to_url(self, value: User) -> str:
        return str(value.pk)


register_converter(UserConverter, "user_of_tests")


@pytest.mark.scenario(16)
def test_a_route_argument_of_any_type_counts(same: Same, settings: Any) -> None:
    view = token_required(idempotent("tests.converted")(lambda request, payee: plain_answer(request)))
    settings.ROOT_URLCONF = (path("pay/<user_of_tests:payee>/", view),)
    carol, dave = UserFactory(), UserFactory()
    assert same({"url": f"/pay/{carol.pk}/"}, {"url": f"/pay/{carol.pk}/"})
    assert not same({"url": f"/pay/{carol.pk}/"}, {"url": f"/pay/{dave.pk}/"})


class Seat:
    """What a converter may make of a path, without a text of its own."""

    def __init__(self, number: str) -> None:
        self.number = number


class NamedSeat(Seat):
    def __str__(self) -> str:
        return f"seat {self.number}"


class SeatConverter:
    regex = "[0-9]+"

    def to_python(self, value: str) -> Seat:
        return Seat(value)

    def to_url(self, value: Seat) -> str:
        return value.number


class NamedSeatConverter(SeatConverter):
    def to_python(self, value: str) -> Seat:
        return NamedSeat(value)


class SeatsConverter(SeatConverter):
    def to_python(self, value: str) -> Any:
        return [Seat(value)]


for _name, _converter in {"seat": SeatConverter, "named_seat": NamedSeatConverter, "seats": SeatsConverter}.items():
    register_converter(_converter, f"{_name}_of_tests")


@pytest.mark.scenario(16)
@pytest.mark.parametrize("kind", ["seat", "seats"])
def test_a_route_argument_without_a_text_of_its_own_is_refused_with_the_remedy(
    alice: Caller, settings: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Its text is an address in memory, by which an honest retry would be another request."""
    view = token_required(idempotent("tests.seats")(lambda request, seat: plain_answer(request)))
    settings.ROOT_URLCONF = (path(f"book/<{kind}_of_tests:seat>/", view),)
    for _ in range(2):
        assert alice.post("/book/1/", key="k").status_code == 500
    assert "Give the type a __str__" in caplog.text
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.scenario(16)
def test_a_route_argument_counts_by_its_own_text(same: Same, settings: Any) -> None:
    view = token_required(idempotent("tests.named_seats")(lambda request, seat: plain_answer(request)))
    settings.ROOT_URLCONF = (path("book/<named_seat_of_tests:seat>/", view),)
    assert same({"url": "/book/1/"}, {"url": "/book/1/"})
    assert not same({"url": "/book/1/"}, {"url": "/book/2/"})


@pytest.mark.failure_mode(46)
def test_another_method_is_another_payload(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"method": "POST"}, {"method": "PATCH"})
