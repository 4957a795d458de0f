"""Declaring an operation: what is refused, and how settings and policy come together."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.test import override_settings

from idempotency import ACCEPTED, CONFLICT, PARK, REEXECUTE, Operation, Wait, idempotent
from idempotency.conf import is_recordable
from idempotency.operation import operation_for, registry
from tests.operations import forgetting_operations


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with forgetting_operations():
        yield


def test_an_operation_follows_the_settings_at_the_time_it_is_asked() -> None:
    operation = Operation("unit.settings")
    assert operation.ttl == timedelta(days=3)
    assert operation.lease == timedelta(seconds=60)
    with override_settings(
        IDEMPOTENCY={
            "TTL": timedelta(days=9),
            "LEASE": timedelta(seconds=5),
            "IN_PROGRESS": ACCEPTED,
            "REQUIRED": False,
            "METHODS": ["PUT"],
            "ACCOUNT": "tests.unit.test_operation.an_account",
            "RECORDABLE": "tests.unit.test_operation.only_created",
            "RECORDED_HEADERS": ["X-Trace"],
            "MAX_BODY": 10,
        }
    ):
        assert operation.ttl == timedelta(days=9)
        assert operation.lease == timedelta(seconds=5)
        assert operation.in_progress is ACCEPTED
        assert operation.required is False
        assert operation.methods == ["PUT"]
        assert operation.account(HttpRequest()) == "everyone"
        assert operation.recordable(201)
        assert not operation.recordable(200)
        assert operation.headers == ["X-Trace"]
        assert operation.max_body == 10
    assert operation.in_progress is CONFLICT


def an_account(request: HttpRequest) -> str:
    return "everyone"


def only_created(status: int) -> bool:
    return status == 201


@pytest.mark.failure_mode(10)
def test_what_is_declared_wins_over_the_settings_even_when_it_is_false() -> None:
    operation = Operation("unit.declared", required=False, ttl=timedelta(hours=1), account=an_account)
    with override_settings(IDEMPOTENCY={"REQUIRED": True, "TTL": timedelta(days=9)}):
        assert operation.required is False
        assert operation.ttl == timedelta(hours=1)
        assert operation.account(HttpRequest()) == "everyone"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"ttl": timedelta(0)}, "ttl must be a positive timedelta"),
        ({"lease": timedelta(seconds=-1)}, "lease must be a positive timedelta"),
        ({"lease": 60}, "lease must be a positive timedelta"),
        ({"ttl": timedelta(seconds=9), "lease": timedelta(seconds=9)}, "lease .* not shorter than its ttl"),
        ({"ttl": timedelta(hours=1), "heartbeat": timedelta(hours=2)}, "heartbeat .* longer than its ttl"),
        ({"heartbeat": timedelta(0)}, "heartbeat must be a positive timedelta"),
        ({"transaction": 0}, "transaction must be True or False"),
        ({"required": "yes"}, "required must be True or False"),
        ({"recovery": "park"}, "recovery must be REEXECUTE, PARK or Reconcile"),
        ({"in_progress": 409}, "in_progress must be CONFLICT, ACCEPTED, Wait.* or Attach"),
        ({"methods": []}, "methods must name at least one HTTP method"),
        ({"methods": "POST"}, "methods must be a collection of names"),
        ({"methods": ["post"]}, "in capitals"),
        ({"headers": [b"Location"]}, "headers must be a collection of names"),
        ({"max_body": 0}, "max_body must be a positive number of bytes"),
        ({"max_body": True}, "max_body must be a positive number of bytes"),
        ({"account": 7}, "account must be a callable or a dotted path"),
        ({"recordable": 7}, "recordable must be a callable or a dotted path"),
        ({"command": 7}, "command must be a callable"),
        ({"rebuild": "a.path"}, "rebuild must be a callable"),
    ],
)
def test_a_wrong_policy_is_refused_where_it_is_declared(policy: dict[str, Any], said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said):
        Operation("unit.wrong", **policy)
    assert registry.get("unit.wrong") is None


@pytest.mark.failure_mode(11)
@pytest.mark.parametrize(
    ("policy", "entries"),
    [
        ({"ttl": timedelta(days=3), "lease": timedelta(days=3)}, {}),
        ({"lease": timedelta(days=3)}, {}),
        ({"ttl": timedelta(seconds=60)}, {}),
        ({}, {"TTL": timedelta(days=1), "LEASE": timedelta(days=1)}),
        ({"lease": timedelta(days=1)}, {"TTL": timedelta(days=1)}),
    ],
)
def test_a_crash_never_blocks_a_key_for_its_whole_retention(policy: dict[str, Any], entries: dict[str, Any]) -> None:
    """A lease as long as the retention is refused, wherever the two of them come from."""
    with (
        override_settings(IDEMPOTENCY=entries),
        pytest.raises(ImproperlyConfigured, match=r"(lease|LEASE).*shorter than"),
    ):
        _ = Operation("unit.wedged", **policy).lease


@pytest.mark.parametrize("name", ["", "x" * 256, "a\x00b", "a\nb", None, 7])
def test_a_name_that_can_not_be_stored_is_refused(name: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="An operation's name"):
        Operation(name)


def test_without_a_transaction_the_crash_semantics_must_be_declared() -> None:
    with pytest.raises(ImproperlyConfigured, match="recovery="):
        Operation("unit.outside", transaction=False)
    with pytest.raises(ImproperlyConfigured, match="recovery="):

        @idempotent("unit.outside", transaction=False)
        def view(request: HttpRequest) -> None: ...

    assert Operation("unit.outside", transaction=False, recovery=PARK).recovery is PARK


def test_reexecute_is_the_default_only_with_a_transaction() -> None:
    assert Operation("unit.inside").recovery is REEXECUTE


@pytest.mark.parametrize("seconds", [0, -1, 31, "5", True, float("nan")])
def test_a_wait_is_bounded(seconds: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="Wait"):
        Wait(seconds)
    assert Wait(0.5).seconds == 0.5


def test_one_name_can_not_have_two_policies() -> None:
    Operation("unit.twice", lease=timedelta(seconds=5))
    Operation("unit.twice", lease=timedelta(seconds=5))  # the same again, as when a module is reloaded
    with pytest.raises(ImproperlyConfigured, match="declared already"):
        Operation("unit.twice", lease=timedelta(seconds=6))


def test_a_bare_name_means_the_operation_declared_under_it() -> None:
    declared = Operation("unit.elsewhere", lease=timedelta(seconds=5))
    assert operation_for("unit.elsewhere", {}) is declared
    assert operation_for(declared, {}) is declared
    assert operation_for("unit.new", {}).lease == timedelta(seconds=60)
    with pytest.raises(ImproperlyConfigured, match="has its own policy"):
        operation_for(declared, {"required": False})


def test_an_operation_says_its_name() -> None:
    assert repr(Operation("unit.named")) == "<Operation 'unit.named'>"


@pytest.mark.parametrize("status", [200, 201, 204, 302, 400, 402, 403, 404, 409, 422, 499])
def test_final_answers_are_recordable(status: int) -> None:
    assert is_recordable(status)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_answers_that_ask_for_a_retry_are_not(status: int) -> None:
    assert not is_recordable(status)
