"""What an operation itself says of its payload."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import HttpRequest
from rest_framework import serializers
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import FormParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import FORM, Caller, Serve, effects, problem_code
from tests.http.sameness import Same
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


class CommandSerializer(serializers.Serializer[Any]):
    amount = serializers.IntegerField()
    account = serializers.PrimaryKeyRelatedField(queryset=Transfer.objects.all(), required=False)
    note = serializers.CharField(required=False, allow_null=True)
    computed = serializers.CharField(read_only=True)

    class Line(serializers.Serializer[Any]):
        price = serializers.DecimalField(max_digits=9, decimal_places=2)

    lines = Line(many=True, required=False)
    line = Line(required=False)


def serve_command(serve: Serve, command: Any) -> None:
    @api_view(["POST"])
    @idempotent("tests.command", command=command)
    def view(request: Request) -> Response:
        answer, status = work(request)
        return Response(answer, status=status)

    serve(view)


@pytest.mark.scenario(16)
def test_a_command_of_a_serializer_reads_what_it_declares_in_its_own_types(
    same: Same, serve: Serve, django_assert_num_queries: Any
) -> None:
    serve_command(serve, CommandSerializer)
    first = {"data": {"amount": 1, "lines": [{"price": "1.50"}], "line": {"price": 2}, "account": 7, "note": None}}
    alike = {"amount": "1", "lines": [{"price": 1.5}], "line": {"price": "2.0"}, "account": 7, "note": None}
    assert same(first, {"data": {**alike, "tracking": "not declared", "computed": "read only"}})
    assert not same(first, {"data": {**alike, "amount": 2}})
    assert not same(first, {"data": {**alike, "lines": [{"price": 1.6}]}})
    assert not same(first, {"data": {**alike, "lines": {"price": 1.5}}})
    assert not same(first, {"data": {**alike, "line": 5}})
    assert not same(first, {"data": {**alike, "account": 8}})
    assert not same({"data": {"amount": "many"}}, {"data": {"amount": "few"}})
    assert not same({"data": {"amount": 1}}, {"data": [{"amount": 1}]})


class BoxesSerializer(serializers.Serializer[Any]):
    active = serializers.BooleanField(required=False)
    tags = serializers.MultipleChoiceField(choices=["a", "b"], required=False)


@pytest.mark.scenario(16)
def test_a_partial_update_tells_a_box_that_is_left_out_from_one_that_is_not_ticked(same: Same, serve: Serve) -> None:
    @api_view(["POST", "PATCH"])
    @parser_classes([FormParser])
    @idempotent("tests.boxes", command=BoxesSerializer)
    def view(request: Request) -> Response:
        answer, status = work(request)
        return Response(answer, status=status)

    serve(view)
    absent, unticked = {"data": b"other=1", "content_type": FORM}, {"data": b"active=false", "content_type": FORM}
    assert not same({"method": "PATCH", **absent}, {"method": "PATCH", **unticked})
    assert same({"method": "PATCH", **unticked}, {"method": "PATCH", **unticked})
    # A form that is sent whole leaves a box out to say that it isn't ticked.
    assert same(absent, unticked)


@pytest.mark.scenario(16)
def test_a_command_may_be_any_callable(same: Same, serve: Serve) -> None:
    serve(idempotent("tests.command", command=lambda request: json.loads(request.body)["amount"])(plain_answer))
    assert same({"data": {"amount": 1, "sent_at": "now"}}, {"data": {"amount": 1, "sent_at": "later"}})
    assert not same({"data": {"amount": 1}}, {"data": {"amount": 2}})


def test_a_command_that_can_not_be_fingerprinted_is_a_mistake_of_the_project(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.command", command=lambda request: object())(plain_answer))
    assert alice.post(key="k").status_code == 500
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.failure_mode(42)
def test_a_command_that_recurses_without_end_is_refused(alice: Caller, serve: Serve) -> None:
    def recurse(request: HttpRequest) -> object:
        return recurse(request)

    serve(idempotent("tests.command", command=recurse)(plain_answer))
    assert problem_code(alice.post(key="k")) == "idempotency_payload_invalid"
    assert effects() == 0
