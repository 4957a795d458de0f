"""What an operation itself says of its payload."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.exceptions import BadRequest
from django.http import HttpRequest
from rest_framework import serializers
from rest_framework.parsers import FormParser
from rest_framework.request import Request

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import FORM, Caller, assert_refused, effects, records, replayed
from tests.http.sameness import Same
from tests.http.serving import Framework, Serve, drf_view
from tests.http.views import drf_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


class CommandSerializer(serializers.Serializer[Any]):
    amount = serializers.IntegerField()
    account = serializers.PrimaryKeyRelatedField(queryset=Transfer.objects.all(), required=False)
    note = serializers.CharField(required=False, allow_null=True)
    computed = serializers.CharField(read_only=True)

    class Line(serializers.Serializer[Any]):
        price = serializers.DecimalField(max_digits=9, decimal_places=2)

    lines = Line(many=True, required=False)
    line = Line(required=False)


ALIKE = {"amount": "1", "lines": [{"price": 1.5}], "line": {"price": "2.0"}, "account": 7, "note": None}


@pytest.mark.scenario(16)
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tracking": "not declared", "computed": "read only"}, True),
        ({"amount": 2}, False),
        ({"lines": [{"price": 1.6}]}, False),
        ({"lines": {"price": 1.5}}, False),
        ({"line": 5}, False),
        ({"account": 8}, False),
    ],
)
def test_a_command_of_a_serializer_reads_what_it_declares_in_its_own_types(
    same: Same, serve: Serve, changed: dict[str, Any], expected: bool
) -> None:
    serve(drf_view(idempotent("tests.command", command=CommandSerializer)(drf_answer)))
    first = {"amount": 1, "lines": [{"price": "1.50"}], "line": {"price": 2}, "account": 7, "note": None}
    assert same({"data": first}, {"data": {**ALIKE, **changed}}) == expected


@pytest.mark.scenario(16)
def test_a_command_of_a_serializer_tells_values_apart_that_it_would_refuse(same: Same, serve: Serve) -> None:
    serve(drf_view(idempotent("tests.command", command=CommandSerializer)(drf_answer)))
    assert not same({"data": {"amount": "many"}}, {"data": {"amount": "few"}})
    assert not same({"data": {"amount": 1}}, {"data": [{"amount": 1}]})


class BoxesSerializer(serializers.Serializer[Any]):
    active = serializers.BooleanField(required=False)
    tags = serializers.MultipleChoiceField(choices=["a", "b"], required=False)


@pytest.mark.scenario(16)
def test_a_partial_update_tells_a_box_that_is_left_out_from_one_that_is_not_ticked(same: Same, serve: Serve) -> None:
    serve(drf_view(idempotent("tests.boxes", command=BoxesSerializer)(drf_answer), parsers=[FormParser]))
    absent, unticked = b"other=1", b"active=false"
    assert not same(absent, unticked, method="PATCH", content_type=FORM)
    # A form that is sent whole leaves a box out to say that it isn't ticked.
    assert same(absent, unticked, content_type=FORM)


@pytest.mark.scenario(16)
def test_a_command_may_be_any_callable(same: Same, serve: Serve) -> None:
    serve(idempotent("tests.command", command=lambda request: json.loads(request.body)["amount"])(plain_answer))
    assert same({"data": {"amount": 1, "sent_at": "now"}}, {"data": {"amount": 1, "sent_at": "later"}})
    assert not same({"data": {"amount": 1}}, {"data": {"amount": 2}})


def test_a_command_that_can_not_be_fingerprinted_is_a_mistake_of_the_project(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.command", command=lambda request: object())(plain_answer))
    assert alice.post(key="k").status_code == 500
    assert (effects(), records()) == (0, [])


@pytest.mark.failure_mode(42)
def test_a_command_that_recurses_without_end_is_refused(alice: Caller, serve: Serve) -> None:
    def recurse(request: HttpRequest) -> object:
        return recurse(request)

    serve(idempotent("tests.command", command=recurse)(plain_answer))
    assert_refused(alice, "idempotency_payload_invalid", key="k")


# What a client may do under the key of a request that its command refuses


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


@pytest.mark.scenario(13)
def test_a_payload_that_the_command_refuses_claims_nothing_and_may_be_corrected(
    alice: Caller, framework: Framework
) -> None:
    framework.serve(work, command=checked_by_hand if framework.name == "plain" else checked_by_serializer)
    for _ in range(2):
        assert alice.post(data={"amount": -1}, key="k").status_code == 400
        assert not IdempotencyRecord.objects.exists()
    replayed(alice, data={"amount": 1})
    assert_refused(alice, "idempotency_key_reused", data={"amount": 2}, key="k")
