"""Steps: phases whose results outlive the attempt that ran them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from idempotency import require_claim
from idempotency.exceptions import LeaseLostError
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.protocol import claims
from tests.concurrency.conftest import Post
from tests.concurrency.failures import unreachable
from tests.concurrency.traces import effects
from tests.concurrency.urls import handler


def test_a_step_that_finished_is_not_run_again(post: Post) -> None:
    calls: list[str] = []

    def phases(request: Any) -> None:
        first = require_claim().step("first", lambda: calls.append("first") or {"id": (1, 2)})
        assert first == {"id": [1, 2]}  # as JSON gives it back, the first time too
        if len(calls) < 2:
            calls.append("cut off")
            raise RuntimeError
        require_claim().step("second", lambda: calls.append("second"))

    handler.before = phases
    assert post("/again/").status_code == 500
    assert post("/again/").status_code == 201
    assert calls == ["first", "cut off", "second"]
    assert effects() == ["one"]
    assert sorted(IdempotencyStep.objects.values_list("name", flat=True)) == ["first", "second"]


def test_a_step_that_was_cut_off_gets_the_same_derived_key_again(post: Post) -> None:
    derived: list[Any] = []

    def phases(request: Any) -> None:
        def call() -> None:
            derived.append(
                (
                    require_claim().attempt,
                    require_claim().derive_key("provider.charge"),
                    require_claim().derive_text("other", 16),
                )
            )
            if len(derived) == 1:
                raise RuntimeError

        require_claim().step("charge", call)

    handler.before = phases
    post("/again/")
    post("/again/")
    assert [attempt for attempt, *_ in derived] == [1, 2]
    assert derived[0][1:] == derived[1][1:]


def test_a_lost_lease_stops_a_step_before_it_runs_and_keeps_nothing_of_one_that_ran(post: Post) -> None:
    ran: list[str] = []

    def lose(request: Any) -> None:
        def overtaken_inside() -> str:
            ran.append("inside")
            IdempotencyRecord.objects.update(attempt=2)
            return "stale"

        with pytest.raises(LeaseLostError):
            require_claim().step("inside", overtaken_inside)
        require_claim().ownership.lost = False  # as it would be in a process that has not noticed
        with pytest.raises(LeaseLostError):
            require_claim().step("before", lambda: ran.append("before"))
        require_claim().step("known", lambda: ran.append("known"))

    handler.before = lose
    assert post("/again/").status_code == 409
    assert ran == ["inside"]
    assert IdempotencyStep.objects.count() == 0


def test_a_step_is_refused_with_the_remedy_where_it_can_not_work(post: Post) -> None:
    def refused(request: Any) -> None:
        with pytest.raises(ImproperlyConfigured, match="transaction=False"):
            require_claim().step("x", lambda: None)

    handler.before = refused
    assert post("/inside/").status_code == 201

    def wrong(request: Any) -> None:
        for name in ("", "x" * 256, "a\nb", 7):
            with pytest.raises(ValueError, match="name"):
                require_claim().step(name, lambda: None)
        with pytest.raises(TypeError, match=r"'object'.*must return JSON"):
            require_claim().step("object", lambda: object())

    handler.before = wrong
    assert post("/again/").status_code == 201


class Sized(Protocol):
    def __len__(self) -> int: ...


def declaring(returns: Any, result: Any = None) -> Callable[[], Any]:
    """A function that says that it returns this."""

    def call() -> Any:
        assert result != "refused", "it must not be run"
        return result

    call.__annotations__["return"] = returns
    return call


@pytest.mark.parametrize("returns", [bytes, datetime | None])
def test_a_step_that_declares_what_json_does_not_hold_is_refused_before_it_runs(post: Post, returns: Any) -> None:
    def refused(request: Any) -> None:
        with pytest.raises(TypeError, match=r"'declared'.*(bytes|datetime).*not run"):
            require_claim().step("declared", declaring(returns, "refused"))

    handler.before = refused
    assert post("/again/").status_code == 201
    assert IdempotencyStep.objects.count() == 0


@pytest.mark.parametrize(
    "call",
    [
        declaring(list[object], []),
        declaring(Mapping[str, int], {}),
        declaring(object),
        declaring(Any),
        declaring(Sized, []),
        declaring("KnownToATypeCheckerOnly"),
        partial(declaring(object)),
    ],
)
def test_a_step_that_may_return_json_is_run(post: Post, call: Any) -> None:
    handler.before = lambda request: require_claim().step("declared", call)
    assert post("/again/").status_code == 201
    assert IdempotencyStep.objects.count() == 1


def test_calls_are_named_alike_by_each_attempt_and_those_of_a_step_by_themselves(post: Post) -> None:
    names: list[list[str]] = []

    def calls(request: Any) -> None:
        here = [require_claim().name_call("mail"), require_claim().name_call("mail")]
        require_claim().step("first", lambda: here.append(require_claim().name_call("mail")))
        require_claim().step(
            "second", lambda: require_claim().step("inner", lambda: here.append(require_claim().name_call("mail")))
        )
        names.append([*here, require_claim().name_call("mail")])
        if require_claim().attempt == 1:
            raise ZeroDivisionError

    handler.before = calls
    assert post("/again/").status_code == 500
    assert post("/again/").status_code == 201
    assert names == [
        ["mail", "mail#2", "first/mail", "second/inner/mail", "mail#3"],
        ["mail", "mail#2", "mail#3"],  # the steps are skipped, and shift nothing
    ]


@pytest.mark.parametrize("reached", [0, 1], ids=["before it runs", "after it ran"])
def test_a_step_whose_store_is_out_of_reach_stops_the_work(
    post: Post, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idempotency.protocol import steps

    proofs: list[Any] = []
    prove_ownership = steps.prove_ownership

    def break_off(owned: Any) -> None:
        if len(proofs) == reached:
            unreachable()
        proofs.append(prove_ownership(owned))

    monkeypatch.setattr(steps, "prove_ownership", break_off)
    handler.before = lambda request: require_claim().step("x", lambda: 1)
    assert post("/again/").status_code == 503
    assert effects() == []


def test_the_steps_of_an_old_request_are_not_those_of_a_new_one_with_its_key(post: Post) -> None:
    results: list[int] = []
    handler.before = lambda request: results.append(require_claim().step("x", lambda: len(results)))
    post("/again/")
    IdempotencyRecord.objects.update(expires_at="2000-01-01T00:00Z")
    post("/again/", label="two")
    assert results == [0, 1]
    assert effects() == ["one", "two"]


def test_a_new_request_that_lost_its_claim_leaves_the_steps_alone(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    handler.before = lambda request: require_claim().step("x", lambda: 1)
    post("/again/")
    IdempotencyRecord.objects.update(expires_at="2000-01-01T00:00Z")
    monkeypatch.setattr(claims.sql.store("default"), "start_over", lambda *args, **kwargs: False)
    assert post("/again/", label="two").status_code == 409
    assert IdempotencyStep.objects.count() == 1


def test_steps_say_what_they_are_of() -> None:
    assert str(IdempotencyStep(record_id=7, name="charge")) == "charge of record 7"


# In Django's TestCase, whose transaction hides the record from every other connection


def test_a_step_name_is_used_once_in_an_attempt(post: Post) -> None:
    """The second one would be skipped without a word."""
    ran: list[str] = []

    def twice(request: Any) -> None:
        require_claim().step("mail", lambda: ran.append("first"))
        with pytest.raises(ValueError, match="has run a step named 'mail' in this attempt already"):
            require_claim().step("mail", lambda: ran.append("second"))

    handler.before = twice
    assert post("/again/").status_code == 201
    assert ran == ["first"]


def test_a_step_name_that_another_attempt_has_used_is_used_once_too(post: Post) -> None:
    def cut_off(request: Any) -> None:
        require_claim().step("mail", lambda: 1)
        raise RuntimeError("on purpose")

    handler.before = cut_off
    assert post("/again/").status_code == 500

    def twice(request: Any) -> None:
        assert require_claim().step("mail", lambda: 2) == 1
        with pytest.raises(ValueError, match="already"):
            require_claim().step("mail", lambda: 3)

    handler.before = twice
    assert post("/again/").status_code == 201


def test_a_step_that_failed_may_be_tried_again_in_the_same_attempt(post: Post) -> None:
    def try_again(request: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            require_claim().step("mail", lambda: 1 // 0)
        assert require_claim().step("mail", lambda: 2) == 2

    handler.before = try_again
    assert post("/again/").status_code == 201


def test_a_step_inside_an_open_transaction_is_refused_because_its_result_would_not_be_kept(post: Post) -> None:
    ran: list[int] = []

    def inside(request: Any) -> None:
        with transaction.atomic():
            require_claim().step("mail", lambda: ran.append(1))

    handler.before = inside
    answer = post("/again/")
    assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_outer_transaction")
    assert ran == []
