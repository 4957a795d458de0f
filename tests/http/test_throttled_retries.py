"""A client that is throttled still learns an outcome that is recorded, and nothing else."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.core.cache import cache
from rest_framework.decorators import action, api_view, permission_classes, throttle_classes
from rest_framework.exceptions import PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from idempotency import idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.contrib.rest_framework.throttling import check_rate
from idempotency.http.key_sources import FromHeader
from tests.http.callers import Caller, claim_anew, effects, records
from tests.http.serving import Serve
from tests.http.test_cost import LOOK, authentication, statements
from tests.http.views import drf_answer, plain_answer

pytestmark = pytest.mark.django_db(transaction=True)


class Busy(BaseThrottle):
    """Refuses whatever says so."""

    def allow_request(self, request: Any, view: Any) -> bool:
        return "HTTP_X_BUSY" not in request.META

    def wait(self) -> float:
        return 7.0


BUSY = {"X-Busy": "1"}


class Method(APIView):
    throttle_classes = (Busy,)

    @idempotent("throttled.method")
    def post(self, request: Request) -> Response:
        return drf_answer(request)


class Heir(Method):
    """Refuses in its own words, and its parent's class has been prepared."""

    def throttled(self, request: Any, wait: Any) -> None:
        super().throttled(request, wait)


class Actions(IdempotentMixin, ViewSet):
    throttle_classes = (Busy,)
    idempotent_operations: ClassVar = {"create": "throttled.create"}

    def create(self, request: Request) -> Response:
        return drf_answer(request)

    @action(detail=False, methods=["post"])
    def unprotected(self, request: Request) -> Response:
        return drf_answer(request)


VIEWS = {
    "function": lambda: api_view(["POST"])(throttle_classes([Busy])(idempotent("throttled.function")(drf_answer))),
    "method": Method.as_view,
    "heir": Heir.as_view,
    "key of its own": lambda: api_view(["POST"])(
        throttle_classes([Busy])(idempotent("throttled.keyed", key=FromHeader("X-Event-Id"))(drf_answer))
    ),
    "optional key of its own": lambda: api_view(["POST"])(
        throttle_classes([Busy])(
            idempotent("throttled.optional", key=FromHeader("X-Event-Id"), required=False)(drf_answer)
        )
    ),
    "mixin": lambda: Actions.as_view({"post": "create"}),
}


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The rates in force, which a test may change."""
    rates: dict[str, Any] = {"idempotent_replays": "9/hour"}
    monkeypatch.setattr(api_settings, "DEFAULT_THROTTLE_RATES", rates, raising=False)
    return rates


def assert_throttled(alice: Caller, url: str = "/", **options: Any) -> None:
    before = effects(), records()
    refused = alice.post(url, headers=BUSY, **options)
    assert (refused.status_code, refused["Retry-After"]) == (429, "7")
    assert "Idempotency-Replayed" not in refused
    assert (effects(), records()) == before


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.usefixtures("atomic")
def test_a_throttled_client_learns_a_recorded_outcome_and_no_more(alice: Caller, serve: Serve, kind: str) -> None:
    serve(VIEWS[kind]())
    first = alice.post(data={"amount": 1}, key="k")
    replay = alice.post(data={"amount": 1}, key="k", headers=BUSY)
    assert (replay.status_code, replay.content) == (201, first.content)
    assert (replay["Idempotency-Replayed"], replay["Idempotency-Key"]) == ("true", "k")
    assert_throttled(alice, data={"amount": 2}, key="k")
    for key in ("unknown", "not,one", None):
        assert_throttled(alice, data={"amount": 1}, key=key)
    claim_anew()
    assert_throttled(alice, data={"amount": 1}, key="k")


def test_another_account_and_an_unprotected_handler_stay_throttled(alice: Caller, bob: Caller, serve: Serve) -> None:
    serve(Actions.as_view({"post": "create"}), **{"other/": Actions.as_view({"post": "unprotected"})})
    alice.post(key="k")
    assert_throttled(bob, key="k")
    assert_throttled(alice, "/other/", key="k")


def test_look_ups_have_a_bound_of_their_own(alice: Caller, serve: Serve, rates: dict[str, Any]) -> None:
    serve(VIEWS["method"]())
    alice.post(key="k")
    rates["idempotent_replays"] = "2/hour"
    assert alice.post(key="k", headers=BUSY).status_code == 201
    assert_throttled(alice)  # without a key there is nothing to look up
    assert_throttled(alice, key="unknown")
    assert_throttled(alice, key="k")
    for wrong in ("often", "1/x", 60, "1"):
        rates["idempotent_replays"] = wrong
        assert [message.id for message in check_rate(None)] == ["idempotency.E021"]
    rates.clear()
    cache.clear()
    assert check_rate(None) == []
    assert_throttled(alice, key="k")  # no rate: switched off


class Allowing(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return "HTTP_X_DENIED" not in request.META


class CheckedLater(Method):
    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if "HTTP_X_DENIED" in request.META:
            raise PermissionDenied


@pytest.mark.parametrize(
    "view",
    [
        lambda: api_view(["POST"])(
            throttle_classes([Busy])(permission_classes([Allowing])(idempotent("throttled.allowed")(drf_answer)))
        ),
        CheckedLater.as_view,
    ],
    ids=["a permission", "a check after the throttles"],
)
def test_what_is_checked_before_a_first_execution_is_checked(alice: Caller, serve: Serve, view: Any) -> None:
    serve(view())
    alice.post(key="k")
    assert alice.post(key="k", headers=BUSY).status_code == 201
    assert alice.post(key="k", headers={**BUSY, "X-Denied": "1"}).status_code == 403


def test_only_a_throttled_request_is_looked_up(alice: Caller, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(cache, "get", lambda key, default=None: counted.append(key) or default)
    serve(VIEWS["method"](), **{"bare/": plain_answer})
    before = authentication(alice)
    alice.post(key="k")
    assert counted == []
    with statements() as made:
        assert alice.post(key="k", headers=BUSY).status_code == 201
    assert made == [*before, *LOOK]
    assert counted == [f"throttle_idempotent_replays_{alice.user.pk}"]
