"""What a client may do under the key of a request that was found invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.exceptions import BadRequest
from django.http import HttpRequest, JsonResponse
from rest_framework import serializers
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.conf import is_recordable_unless_invalid
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.views import work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.scenario(13)]


@pytest.mark.parametrize("status", [400, 422])
def test_the_same_payload_runs_again_if_its_refusal_is_not_an_outcome(alice: Caller, serve: Serve, status: int) -> None:
    statuses = iter([status, status, 201])

    @idempotent("tests.invalid", recordable=is_recordable_unless_invalid)
    def view(request: HttpRequest) -> JsonResponse:
        work(request)
        return JsonResponse({}, status=next(statuses))

    serve(view)
    for _ in range(2):
        assert alice.post(data={"amount": -1}, key="k").status_code == status
        assert effects() == 0  # what a refused attempt wrote is undone
        # The attempt was claimed for that payload, so its key is not another payload's: it couldn't be told whether the
        # first one is still on its way.
        assert problem_code(alice.post(data={"amount": 1}, key="k")) == "idempotency_key_reused"
    assert alice.post(data={"amount": -1}, key="k").status_code == 201
    assert alice.post(data={"amount": -1}, key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1


def test_every_other_refusal_stays_an_outcome() -> None:
    assert [status for status in (200, 302, 402, 404, 409, 410) if not is_recordable_unless_invalid(status)] == []
    assert [status for status in (400, 408, 422, 425, 429, 500) if is_recordable_unless_invalid(status)] == []


class Order(serializers.Serializer[Any]):
    amount = serializers.IntegerField(min_value=1)


def checked_by_serializer(request: Request) -> object:
    order = Order(data=request.data)
    order.is_valid(raise_exception=True)
    return order.validated_data


def checked_by_hand(request: HttpRequest) -> object:
    order = json.loads(request.body)
    if order["amount"] < 1:
        raise BadRequest("amount must be positive")
    return order


@pytest.mark.parametrize("framework", ["plain", "drf"])
def test_a_payload_that_the_command_refuses_claims_nothing_and_may_be_corrected(
    alice: Caller, serve: Serve, framework: str
) -> None:
    def handler(request: Any) -> Any:
        work(request)
        return JsonResponse({}, status=201) if framework == "plain" else Response({}, status=201)

    if framework == "plain":
        serve(idempotent("tests.checked", command=checked_by_hand)(handler))
    else:
        serve(api_view(["POST"])(idempotent("tests.checked", command=checked_by_serializer)(handler)))
    for _ in range(2):
        assert alice.post(data={"amount": -1}, key="k").status_code == 400
        assert not IdempotencyRecord.objects.exists()
    assert alice.post(data={"amount": 1}, key="k").status_code == 201
    assert alice.post(data={"amount": 1}, key="k")["Idempotency-Replayed"] == "true"
    assert problem_code(alice.post(data={"amount": 2}, key="k")) == "idempotency_key_reused"
    assert effects() == 1
