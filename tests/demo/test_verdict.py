"""The demo's verdict, and the judgement before it: a fault fails the run, and so does a trouble that never came."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from testproject.demo.client import Answer
from testproject.demo.plan import Charge, Trouble
from testproject.demo.verdict import CHARGES, ORDERS, Findings, History, Row, complaints, judge

GOOD = {"expected": 20, "effects": 20}
CONTROL = {"expected": 20, "effects": 30, "doubled": 10, "ghosts": 5, "wrong": 9}
FAULTS = "doubled=1 lost=1 wrong=1 unsettled=1 effects=19 effects=21 cut=0 replay=0 kills=0"
STORMS = {
    "charges": (CHARGES, f"{FAULTS} key_reused=0 take_overs=0", "doubled=0"),
    "orders": (ORDERS, f"{FAULTS} ghosts=1 replays=0 relays=0 children=0 workers=0 brokers=0", "doubled=0 ghosts=0"),
}


def verdict(rows: tuple[Row, ...], protected: str = "", unprotected: str = "") -> list[str]:
    """The complaints about a good run that differs in one figure."""
    troubles = {row.figure: 1 for row in rows if row.must == "more than 0"}
    findings = []
    for good, changed in ((GOOD, protected), (CONTROL, unprotected)):
        name, _, value = changed.partition("=")
        findings.append(Findings(Counter({**good, **troubles, **({name: int(value)} if name else {})})))
    return complaints("storm", rows, *findings)


@pytest.mark.parametrize("storm", STORMS)
def test_any_fault_and_any_trouble_that_never_came_fails(storm: str) -> None:
    rows, of_protected, of_unprotected = STORMS[storm]
    assert verdict(rows) == []
    for changed in of_protected.split():
        assert len(verdict(rows, changed)) == 1, changed
    for changed in of_unprotected.split():
        assert len(verdict(rows, unprotected=changed)) == 1, changed


def test_a_complaint_says_where_what_and_what_must_be() -> None:
    assert verdict(CHARGES, "doubled=3") == ["storm, protected: more than one effect: 3; must be 0."]


# The judgement: doubled, lost, wrong, unsettled

LABEL = "run-0"
EFFECTS = {LABEL: [7]}


def charge(number: int = 0, source: str = "card") -> Charge:
    label = f"run-{number}"
    return Charge(number, "alice", label, label, 1000, Trouble.CALM, 1, True, True, source)


def created(pk: int = 7, **changes: Any) -> Answer:
    values = {"status": 201, "content_type": "application/json", "location": f"/charges/{pk}/"}
    return Answer(**{**values, "body": json.dumps({"id": pk}).encode(), **changes})


def problem(status: int, code: str) -> Answer:
    return Answer(status=status, content_type="application/problem+json", location=None, body=b"{}", code=code)


REJECTED = problem(422, "idempotency_key_reused")
CONFLICT = problem(409, "idempotency_in_progress")
DECLINED = Answer(status=402, content_type="application/json", location=None, body=b"{}")


def told(*answers: Answer, **more: Any) -> History:
    return History(charge(), answers=list(answers), **more)


def nonzero(found: Findings) -> dict[str, int]:
    return {name: value for name, value in found.figures.items() if value and name != "expected"}


FINE, WRONG = {"effects": 1}, {"effects": 1, "wrong": 1}
#: What the clients of one charge were told, the effects, and what must be found.
CHARGED: dict[str, tuple[History, dict[str, list[int]], dict[str, int]]] = {
    "one outcome": (told(created(), created(replayed=True), answers_to_changed=[REJECTED]), EFFECTS, FINE),
    "two effects, although every client was told the same": (
        told(created(), created()),
        {LABEL: [7, 8]},
        {"effects": 2, "doubled": 1},
    ),
    "acknowledged without an effect": (told(created()), {}, {"lost": 1}),
    "neither acknowledged nor an effect": (told(gave_up=1), {}, {"unsettled": 1}),
    "an effect that was never asked for": (told(created()), {**EFFECTS, "run-9": [9]}, {"effects": 2, "ghosts": 1}),
    "a client that gave up": (told(created(), gave_up=1), EFFECTS, {**FINE, "unsettled": 1}),
    **{
        f"another {what} than the first": (told(created(), other), EFFECTS, WRONG)
        for what, other in {
            "effect": created(8),
            "status": created(status=200),
            "location": created(location="/charges/8/"),
            "type": created(content_type="text/html"),
            "spelling": created(body=b'{"id":  7}'),
            "outcome, still in progress": CONFLICT,
        }.items()
    },
    "another status, although it names the effect": (told(created(status=200)), EFFECTS, WRONG),
    **{
        f"an answer that does not name the effect: {body!r}": (told(created(body=body)), EFFECTS, WRONG)
        for body in (b'{"id": 9}', b"{}", b"no json", b"[]")
    },
    **{
        f"a changed payload that was {what}": (told(created(), answers_to_changed=[answer]), EFFECTS, WRONG)
        for what, answer in {
            "accepted": created(),
            "refused with another code": problem(422, "invalid"),
            "refused with another status": problem(409, "idempotency_key_reused"),
        }.items()
    },
}


@pytest.mark.parametrize(("history", "effects", "found"), CHARGED.values(), ids=CHARGED)
def test_what_is_found_of_a_charge(history: History, effects: Any, found: dict[str, int]) -> None:
    assert nonzero(judge([history], effects)) == found


def orders(
    *answers: Answer, declined: Answer = DECLINED, charges: Any = EFFECTS, receipts: Any = None, gave_up: int = 0
) -> Findings:
    """What is found of an order that is accepted and one that is declined."""
    histories = [
        History(charge(), answers=[] if gave_up else list(answers or (created(),)), gave_up=gave_up),
        History(charge(1, "declined"), answers=[] if gave_up else [declined], gave_up=gave_up),
    ]
    return judge(histories, charges, {LABEL: 1} if receipts is None else receipts)


ORDERED: dict[str, tuple[Findings, dict[str, int]]] = {
    "one receipt": (orders(created(), created()), FINE),
    "two receipts": (orders(receipts={LABEL: 2}), {"effects": 2, "doubled": 1}),
    "no receipt": (orders(receipts={}), {"lost": 1}),
    "a receipt of a declined order": (orders(receipts={LABEL: 1, "run-1": 1}), {"effects": 2, "ghosts": 1}),
    "two outcomes": (orders(created(), DECLINED), WRONG),
    "declined and accepted": (orders(declined=created()), WRONG),
    "charged twice": (orders(charges={LABEL: [7, 8]}), WRONG),
    "acknowledged and not charged": (orders(charges={}), WRONG),
    "declined and charged": (orders(charges={**EFFECTS, "run-1": [9]}), WRONG),
    "clients that gave up": (orders(charges={}, receipts={}, gave_up=1), {"unsettled": 2}),
}


@pytest.mark.parametrize(("findings", "found"), ORDERED.values(), ids=ORDERED)
def test_what_is_found_of_an_accepted_and_a_declined_order(findings: Findings, found: dict[str, int]) -> None:
    assert nonzero(findings) == found
    assert findings.figures["expected"] == 1


def test_the_first_few_of_each_kind_are_shown_with_their_names() -> None:
    histories = [told(created(8), gave_up=1) for _ in range(5)]
    found = judge(histories, {LABEL: [7, 7], **{f"other-{number}": [number] for number in range(5)}})
    kinds = Counter(example.partition(" ")[0] for example in found.examples)
    assert kinds == {"doubled:": 1, "not": 3, "wrong:": 3, "never": 3}
    assert f"wrong: {LABEL} (calm) was answered 201" in "\n".join(found.examples)


@pytest.mark.parametrize(("status", "acknowledged"), [(199, False), (200, True), (299, True), (300, False)])
def test_a_success_is_an_acknowledgement_and_nothing_else_is(status: int, acknowledged: bool) -> None:
    assert told(CONFLICT, created(status=status)).acknowledged == acknowledged
