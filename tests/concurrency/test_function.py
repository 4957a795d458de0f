"""``claim()``: a block of code as one logical operation, without HTTP."""

from enum import StrEnum

import pytest
from django.db import transaction

from idempotency import PARK, claim, current_claim
from idempotency.exceptions import (
    AccountInvalidError,
    AccountRequiredError,
    KeyInvalidError,
    KeyReusedError,
    OutcomeUnknownError,
    OutcomeUnreadableError,
    PayloadInvalidError,
    UnrecordableResponseError,
)
from idempotency.models import IdempotencyRecord
from idempotency.operation import Operation
from testproject.models import Transfer
from tests.concurrency.traces import effects

pytestmark = pytest.mark.django_db(transaction=True)


def send(account, **more):
    arguments = {"account_id": account, "key": "k", "payload": {"to": "bob"}} | more
    with claim("tests.function.send", **arguments) as run:
        if not run.replayed:
            transfer = Transfer.objects.create(account_id=int(account), amount=1, label="one")
            run.result = {"id": transfer.pk, "attempt": run.claim.attempt}
    return run


def test_a_block_runs_once_and_keeps_its_result(account):
    first, second = send(account), send(account)
    assert (first.replayed, second.replayed) == (False, True)
    assert first.result == second.result
    assert effects() == ["one"]
    assert current_claim() is None


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (None, ZeroDivisionError, "by zero"),
        *((result, TypeError, "must be JSON") for result in (object(), float("nan"), {1, 2})),
    ],
    ids=["an error", "object", "nan", "set"],
)
def test_a_block_that_raises_or_sets_non_json_is_undone_and_released(account, result, error, message):
    def block():
        with claim("tests.function.send", account_id=account, key="k", payload={"to": "bob"}) as run:
            Transfer.objects.create(account_id=int(account), amount=1, label="undone")
            run.result = result or 1 / 0

    with pytest.raises(error, match=message):
        block()
    assert effects() == []
    assert send(account).result["attempt"] == 2


class Size(StrEnum):
    S = "s"


@pytest.mark.parametrize("result", [(1, 2), {"at": (1, 2)}, {1: "a"}, {None: 1}, Size.S, {"a": [1, 2.5, None]}, None])
@pytest.mark.parametrize("policy", [{}, {"redact": lambda status, headers, body: b'"kept"'}], ids=["as is", "redacted"])
def test_a_block_has_the_same_result_at_first_as_later(account, result, policy):
    """Otherwise the code that uses the result meets another type on a retry, which is rarely tested."""
    results = []
    for _ in range(2):
        with claim("tests.function.again", account_id=account, key="k", **policy) as run:
            if not run.replayed:
                run.result = result
        results.append(run.result)
    assert [*map(repr, results)] == [repr(results[1])] * 2


@pytest.mark.parametrize(
    ("policy", "label", "record"),
    [({}, [], "recoverable"), ({"transaction": False, "recovery": PARK}, ["part"], "parked")],
    ids=["in a transaction", "outside"],
)
def test_a_block_may_discard_its_result(account, policy, label, record):
    arguments = {"account_id": account, "key": "k", "payload": {"to": "bob"}}
    with claim("tests.function.send", **arguments, **policy) as run:
        Transfer.objects.create(account_id=int(account), amount=1, label="part")
        run.claim.discard()
        run.result = "a part"
    assert (run.result, effects()) == ("a part", label)
    assert IdempotencyRecord.objects.get().status == record
    if not policy:
        assert send(account).result["attempt"] == 2


def test_each_kind_of_failure_has_a_separate_exception(account):
    with pytest.raises(AccountRequiredError):
        send(account, account_id=None)
    for unusable in ("", "x" * 256, 7):
        with pytest.raises(AccountInvalidError, match="the account from account_id must be 1 to 255"):
            send(account, account_id=unusable)
    with pytest.raises(KeyInvalidError):
        send(account, key="a b")
    with pytest.raises(PayloadInvalidError):
        send(account, payload=float("inf"))
    send(account)
    with pytest.raises(KeyReusedError):
        send(account, payload={"to": "carol"})
    IdempotencyRecord.objects.update(status="parked")
    with pytest.raises(OutcomeUnknownError):
        send(account)
    assert effects() == ["one"]


@pytest.mark.failure_51
def test_a_result_above_max_body_is_refused_and_its_effect_rolled_back(account):
    def send_text(length):
        with claim("tests.function.large", account_id=account, key="k", max_response_body=100) as run:
            Transfer.objects.create(account_id=int(account), amount=1, label=str(length))
            run.result = "a" * length  # plus two quotation marks

    with pytest.raises(UnrecordableResponseError, match="has 101 bytes as JSON, but max_response_body is 100"):
        send_text(99)
    assert (IdempotencyRecord.objects.get().status, effects()) == ("recoverable", [])
    send_text(98)
    assert effects() == ["98"]


@pytest.mark.sqlite  # PostgreSQL's json column refuses invalid JSON
def test_a_damaged_result_is_unreadable_and_never_run_again(account):
    send(account)
    IdempotencyRecord.objects.update(response_body="{")
    with pytest.raises(OutcomeUnreadableError):
        send(account)
    assert effects() == ["one"]


def test_a_block_without_a_result_replays_none(account):
    for replayed in (False, True, True):
        with claim("tests.function.send", account_id=account, key="k") as run:
            assert run.replayed is replayed
        assert run.result is None
        if replayed:
            IdempotencyRecord.objects.update(response_body=None)  # as after a reconciler's response without a body


def test_an_inner_block_has_a_separate_claim(account):
    outer_operation = Operation.declare("tests.function.park", transaction=False, recovery=PARK)
    with claim(outer_operation, account_id=account, key="outer") as outer:
        assert current_claim() is outer.claim
        send(account, key="inner")
        assert current_claim() is outer.claim
        with transaction.atomic():
            outer.result = 1
    assert current_claim() is None
    states = set(IdempotencyRecord.objects.values_list("idempotency_key", "status"))
    assert states == {("outer", "completed"), ("inner", "completed")}
