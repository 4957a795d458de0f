"""The demo's judgement of charges, payouts and orders: doubled, lost, wrong, unsettled, parked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testproject.demo.acts import CHARGES, MESSAGES, ORDERS, OUTBOX, PAYOUTS
from testproject.demo.client import Answer
from testproject.demo.plan import Charge, Trouble
from testproject.demo.verdict import Findings, History, judge, judge_messages

PARK = next(side for side in PAYOUTS.sides if side.may_park)
NAME, LABEL = "alice/run-alice-0", "run-alice-0"
EFFECTS = {NAME: [7]}


def charge(number: int = 0, **more: str) -> Charge:
    return Charge(
        number=number,
        account="alice",
        key=f"run-{number}",
        label=f"run-alice-{number}",
        amount=1000,
        trouble=Trouble.CALM,
        burst=1,
        late_duplicate=True,
        changed_payload=True,
        more=more,
    )


def created(pk: int = 7, **changes: Any) -> Answer:
    values = {"status": 201, "content_type": "application/json", "location": f"/charges/{pk}/"}
    return Answer(**{**values, "body": json.dumps({"id": pk}).encode(), **changes})


def problem(status: int, code: str) -> Answer:
    return Answer(status=status, content_type="application/problem+json", location=None, body=b"{}", code=code)


PAID = created(body=b'{"id": 1, "provider_id": 7}')
REJECTED = problem(422, "idempotency_key_reused")
CONFLICT = problem(409, "idempotency_in_progress")
UNKNOWN = problem(409, "idempotency_outcome_unknown")


def judged(history: History, effects: Any = EFFECTS) -> dict[str, int]:
    return nonzero(judge(CHARGES, CHARGES.sides[0], [history], effects))


def nonzero(found: Findings) -> dict[str, int]:
    """What was found, but for how many operations there were."""
    uninteresting = {"operations", "accepted", "declined", "expected"}
    return {name: value for name, value in found.figures.items() if value and name not in uninteresting}


def told(*answers: Answer, **more: Any) -> History:
    return History(charge(), answers=list(answers), **more)


def test_one_effect_and_one_outcome_pass() -> None:
    history = told(created(), created(replayed=True), answers_to_changed=[REJECTED])
    assert judged(history) == {"effects": 1}


def test_a_second_effect_is_doubled_even_if_every_client_was_told_the_same() -> None:
    assert judged(told(created(), created()), {NAME: [7, 8]}) == {"effects": 2, "doubled": 1}


def test_an_acknowledged_charge_without_an_effect_is_lost() -> None:
    assert judged(told(created()), {}) == {"lost": 1}


def test_the_effect_of_another_account_under_the_same_label_does_not_count() -> None:
    found = judged(told(created()), {f"bob/{LABEL}": [7]})
    assert found == {"effects": 1, "lost": 1, "ghosts": 1}


def test_an_effect_that_no_charge_accounts_for_shows_in_the_count() -> None:
    assert judged(told(created()), {**EFFECTS, "alice/run-alice-9": [9]}) == {"effects": 2, "ghosts": 1}


@pytest.mark.parametrize(
    "other",
    [
        created(8),
        created(status=200),
        created(location="/charges/8/"),
        created(content_type="text/html"),
        created(body=b'{"id":  7}'),
        CONFLICT,
    ],
    ids=["effect", "status", "location", "type", "bytes", "still in progress"],
)
def test_an_answer_that_differs_from_the_first_is_wrong(other: Answer) -> None:
    assert judged(told(created(), other))["wrong"] == 1


def test_an_answer_of_another_status_is_wrong_even_if_it_names_the_effect() -> None:
    assert judged(told(created(status=200)))["wrong"] == 1


@pytest.mark.parametrize("body", [b'{"id": 9}', b"{}", b"no json", b"[]"])
def test_an_answer_that_does_not_name_the_effect_is_wrong(body: bytes) -> None:
    assert judged(told(created(body=body)))["wrong"] == 1


@pytest.mark.parametrize("answer", [created(), CONFLICT], ids=["accepted", "in progress"])
def test_a_changed_payload_that_is_not_rejected_is_wrong(answer: Answer) -> None:
    assert judged(told(created(), answers_to_changed=[answer]))["wrong"] == 1


def test_a_client_that_gave_up_is_reported() -> None:
    assert judged(told(created(), gave_up=1))["unsettled"] == 1


def test_a_payout_is_named_by_the_providers_number() -> None:
    history = told(PAID)
    assert judge(PAYOUTS, PARK, [history], EFFECTS).figures["wrong"] == 0
    assert judged(history)["wrong"] == 1


@pytest.mark.parametrize("effects", [{}, EFFECTS], ids=["unpaid", "paid"])
def test_a_parked_payout_is_neither_wrong_nor_lost_where_it_may_be(effects: Any) -> None:
    found = judge(PAYOUTS, PARK, [told(UNKNOWN, UNKNOWN)], effects)
    assert (found.parked, found.figures["wrong"], found.figures["lost"]) == ([LABEL], 0, 0)
    assert judged(told(UNKNOWN, UNKNOWN), effects)["wrong"] == 2


def test_a_parked_payout_that_was_paid_twice_is_doubled() -> None:
    assert judge(PAYOUTS, PARK, [told(UNKNOWN)], {NAME: [7, 8]}).figures["doubled"] == 1


@pytest.mark.parametrize("answers", [[PAID, UNKNOWN], [UNKNOWN, PAID]], ids=["201 first", "409 first"])
def test_a_payout_is_not_unknown_to_one_client_and_known_to_another(answers: list[Answer]) -> None:
    assert judge(PAYOUTS, PARK, [told(*answers)], EFFECTS).figures["wrong"] == 1


DECLINED = Answer(status=402, content_type="application/json", location=None, body=b"{}")
SENT = {f"{message}.{LABEL}": 1 for message in MESSAGES}


def orders(
    *answers: Answer, declined: Answer = DECLINED, charges: Any = EFFECTS, messages: Any = SENT, gave_up: int = 0
) -> dict[str, int]:
    """What is found of an order that is accepted and one that is declined."""
    histories = [
        History(charge(source="card"), answers=[] if gave_up else list(answers or (created(),)), gave_up=gave_up),
        History(charge(1, source="declined"), answers=[] if gave_up else [declined], gave_up=gave_up),
    ]
    return nonzero(judge_messages(judge(ORDERS, OUTBOX, histories, charges), histories, messages))


def test_one_effect_for_each_message_of_an_accepted_order_passes() -> None:
    assert orders(created(), created()) == {"effects": 2}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_with_two_effects_is_doubled_and_without_one_lost(message: str) -> None:
    assert orders(messages={**SENT, f"{message}.{LABEL}": 2}) == {"effects": 3, "doubled": 1}
    assert orders(messages={**SENT, f"{message}.{LABEL}": 0}) == {"effects": 1, "lost": 1}


@pytest.mark.parametrize("label", ["run-alice-1", "run-alice-9"], ids=["declined", "not ordered"])
def test_an_effect_of_a_declined_order_or_of_none_is_found(label: str) -> None:
    assert orders(messages={**SENT, f"{MESSAGES[1]}.{label}": 1}) == {"effects": 2, "ghosts": 1}


@pytest.mark.parametrize(
    "found",
    [
        orders(created(), DECLINED),
        orders(declined=created()),
        orders(charges={NAME: [7, 8]}),
        orders(charges={**EFFECTS, "alice/run-alice-1": [9]}),
    ],
    ids=["two outcomes", "declined and accepted", "charged twice", "declined and charged"],
)
def test_a_wrong_answer_or_charge_is_found(found: dict[str, int]) -> None:
    assert found["wrong"] >= 1


def test_an_order_whose_clients_gave_up_is_reported_and_not_lost() -> None:
    assert orders(charges={}, messages={}, gave_up=1) == {"unsettled": 2}
