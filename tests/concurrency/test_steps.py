"""Steps: phases whose results outlive the attempt that ran them."""

from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, Protocol

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction

from idempotency import require_claim
from idempotency.exceptions import LeaseLostError
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.protocol import steps
from idempotency.store import store_for
from tests.concurrency.failures import fail, unreachable
from tests.concurrency.traces import effects, end_lease, end_retention, record
from tests.concurrency.urls import handler
from tests.database.statements import before_statement


@pytest.fixture
def attempt(post):
    """Runs a handler with this work before its effect, and returns the status of the response."""

    def attempt(work, path="/again/"):
        handler.before = lambda request: work()
        return post(path).status_code

    return attempt


def step(name, call):
    return require_claim().step(name, call)


def test_a_step_that_finished_is_not_run_again(attempt):
    calls = []

    def phases():
        first = step("first", lambda: calls.append("first") or {"id": (1, 2)})
        assert first == {"id": [1, 2]}  # decoded from JSON, even the first time
        if len(calls) < 2:
            calls.append("cut off")
            fail()
        step("second", lambda: calls.append("second"))

    assert [attempt(phases), attempt(phases)] == [500, 201]
    assert calls == ["first", "cut off", "second"]
    assert effects() == ["one"]
    stored = IdempotencyStep.objects.order_by("name").values_list("name", "result")
    assert list(stored) == [("first", '{"id": [1, 2]}'), ("second", "null")]


def test_an_interrupted_step_gets_the_same_derived_key_again(attempt):
    derived = []

    def call():
        claim = require_claim()
        texts = [claim.derive_text("other"), claim.derive_text("other", 16)]
        assert [len(text) for text in texts] == [32, 16]
        derived.append((claim.attempt, claim.derive_key("provider.charge"), *texts))
        if len(derived) == 1:
            fail()

    assert [attempt(lambda: step("charge", call)) for _ in range(2)] == [500, 201]
    assert [number for number, *_ in derived] == [1, 2]
    assert derived[0][1:] == derived[1][1:]


def test_a_lost_lease_stops_a_step_or_discards_the_result_of_one_that_ran(attempt):
    ran = []

    def overtaken_inside():
        ran.append("inside")
        IdempotencyRecord.objects.update(attempt=2)
        return "stale"

    def lose():
        with pytest.raises(LeaseLostError):
            step("inside", overtaken_inside)
        require_claim().ownership.lost = False  # as it would be in a process that has not noticed
        with pytest.raises(LeaseLostError):
            step("before", lambda: ran.append("before"))
        step("known", lambda: ran.append("known"))

    assert attempt(lose) == 409
    assert ran == ["inside"]
    assert IdempotencyStep.objects.count() == 0


def test_a_step_in_its_operations_transaction_is_refused_with_the_remedy(attempt):
    def refused():
        with pytest.raises(ImproperlyConfigured, match="transaction=False"):
            step("x", lambda: None)

    assert attempt(refused, "/inside/") == 201


class Sized(Protocol):
    def __len__(self): ...


def declaring(returns, result=None):
    """A function annotated with this return type."""

    def call():
        assert result != "refused", "the step must not run"
        return result

    call.__annotations__["return"] = returns
    return call


@pytest.mark.parametrize(
    ("name", "call", "error", "message"),
    [
        *((name, lambda: None, ValueError, "name") for name in ("", "x" * 256, "a\nb", 7)),
        ("number", lambda: float("nan"), TypeError, "must return JSON"),
        ("object", lambda: object(), TypeError, r"'object'.*must return JSON"),
        ("declared", declaring(bytes, "refused"), TypeError, "'declared'.*bytes.*not run"),
        ("declared", declaring(datetime | None, "refused"), TypeError, "'declared'.*datetime.*not run"),
        ("declared", declaring(set[int], "refused"), TypeError, "'declared'.*set.*not run"),
    ],
)
def test_a_handler_survives_a_step_refused_for_its_name_or_result(attempt, name, call, error, message):
    def refused():
        with pytest.raises(error, match=message):
            step(name, call)

    assert attempt(refused) == 201
    assert IdempotencyStep.objects.count() == 0


@pytest.mark.parametrize(
    "call",
    [
        declaring(list[object], []),
        declaring(Mapping[str, int], {}),
        declaring(object),
        declaring(Any),
        declaring(Literal["done"], "done"),
        declaring(Sized, []),
        declaring("KnownToATypeCheckerOnly"),
        declaring(OrderedDict | None),
        partial(declaring(object)),
    ],
)
def test_a_step_that_may_return_json_is_run(attempt, call):
    assert attempt(lambda: step("declared", call)) == 201
    assert IdempotencyStep.objects.count() == 1


def test_call_names_are_stable_across_attempts_and_scoped_to_steps(attempt):
    names = []

    def mail():
        return require_claim().name_call("mail")

    def calls():
        here = [mail(), mail()]
        step("first", lambda: here.append(mail()))
        step("second", lambda: step("inner", lambda: here.append(mail())) or here.append(mail()))
        names.append([*here, mail()])
        if require_claim().attempt == 1:
            fail()

    assert [attempt(calls), attempt(calls)] == [500, 201]
    assert names == [
        ["mail", "mail#2", "first/mail", "second/inner/mail", "second/mail", "mail#3"],
        ["mail", "mail#2", "mail#3"],  # the steps are skipped, and shift nothing
    ]


@pytest.mark.parametrize("reached", [0, 1], ids=["before it runs", "after it ran"])
def test_an_unreachable_store_stops_the_work_at_a_step(attempt, reached, monkeypatch):
    proofs = chain([steps.prove_ownership] * reached, repeat(unreachable))
    monkeypatch.setattr(steps, "prove_ownership", lambda owned: next(proofs)(owned))
    assert attempt(lambda: step("x", lambda: 1)) == 503
    assert effects() == []
    assert record().error.startswith("UnavailableError: ")


def test_a_new_request_with_an_expired_key_does_not_reuse_its_steps(post, attempt):
    results = []
    attempt(lambda: results.append(step("x", lambda: len(results))))
    post("/again/", key="another", label="another")
    end_retention()
    post("/again/", label="two")
    assert results == [0, 1, 2]
    assert effects() == ["another", "one", "two"]
    assert sorted(IdempotencyStep.objects.values_list("result", flat=True)) == ["1", "2"]  # the other key's step stays


def test_a_step_is_read_and_stored_in_the_transaction_checking_its_lease(attempt):
    """In separate transactions, another attempt could take over the record in between."""
    seen = []
    with before_statement("idempotency_step", lambda: seen.append(connection.in_atomic_block)):
        assert attempt(lambda: step("x", lambda: 1)) == 201
    assert seen == [True, True]


def test_a_step_begins_with_a_full_lease(attempt):
    left = []

    def work():
        end_lease()
        step("x", lambda: left.append(store_for("default").read(record().scope).lease_left))

    assert attempt(work) == 201
    assert 0 < left[0] <= 60


def test_a_step_is_described_by_its_name_and_record():
    assert str(IdempotencyStep(record_id=7, name="charge")) == "charge of record 7"


@pytest.mark.parametrize(
    "cut_offs", [(False,), (True, False)], ids=["run by this attempt", "run by the attempt before"]
)
def test_a_step_name_is_used_only_once_in_an_attempt(attempt, cut_offs):
    """Otherwise the second step would be skipped silently."""
    ran = []

    def twice(*, cut_off):
        step("mail", lambda: ran.append("first"))
        if cut_off:
            fail()
        with pytest.raises(ValueError, match="has run a step named 'mail' in this attempt already"):
            step("mail", lambda: ran.append("second"))

    assert [attempt(partial(twice, cut_off=cut_off)) for cut_off in cut_offs][-1] == 201
    assert ran == ["first"]


def test_a_failed_step_may_be_retried_in_the_same_attempt(attempt):
    def try_again():
        with pytest.raises(ZeroDivisionError):
            step("mail", lambda: 1 // 0)
        assert step("mail", lambda: 2) == 2

    assert attempt(try_again) == 201


def test_a_step_inside_an_open_transaction_is_refused(post, attempt):
    ran = []

    def inside():
        with transaction.atomic():
            step("mail", lambda: ran.append(1))

    assert attempt(inside) == 500
    assert post("/again/").json()["code"] == "idempotency_outer_transaction"
    assert ran == []
