"""The demo's verdict, and the judgement before it: a fault fails the run, and so does a trouble that never came."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from testproject.demo.acts import ACTS, CHARGES, MESSAGES, ORDERS, OUTBOX, PAYOUTS, SOME, Act
from testproject.demo.client import Answer
from testproject.demo.plan import Charge, Trouble
from testproject.demo.verdict import Findings, History, complaints, judge, judge_messages

WHOLE = {"operations": 20, "accepted": 20, "expected": 20, "effects": 20, "rows": 20}
#: What a good run has where it differs from a side without a fault: the control's damage, and what PARK parks.
GOOD: dict[str, dict[str, int]] = {
    "unprotected": {"effects": 30, "doubled": 10, "wrong": 9},
    "park": {"effects": 18, "parked": 2, "rows": 18},
    "control": {"effects": 30, "doubled": 10, "wrong": 9},
    "direct": {"effects": 30, "doubled": 8, "lost": 1, "ghosts": 5, "wrong": 9},
}
FAULTS = "doubled=1 lost=1 wrong=1 unsettled=1"
DECLARED = f"{FAULTS} killed_at_work=0 provider_failed=0 effects=19 effects=21 parked=1 rows=18 rows=21"
#: Each of these figures, on that side, fails the run.
FAILS = {
    "protected": f"{FAULTS} cut=0 timeout=0 replay=0 conflict=0 key_reused=0 killed_at_work=0 outlived=0 "
    "effects=19 effects=21 take_overs=0 kills=0",
    "unprotected": "doubled=0",
    "reexecute": f"{DECLARED} take_overs=0 deduplicated=0",
    "reconcile": f"{DECLARED} reconciled=0",
    "park": f"{FAULTS} killed_at_work=0 provider_failed=0 rows=17 rows=21",
    "control": "doubled=0",
    "outbox": f"{FAULTS} effects=19 effects=21 ghosts=1 replays=0 killed_at_work=0 relays=0 children=0 workers=0 "
    "brokers=0",
    "direct": "ghosts=0",
}


def verdict(act: Act, changed: str = "", **figures: int) -> list[str]:
    """The complaints about a good run that differs as given on one side."""
    findings = {}
    for side in act.sides:
        seen = {row.figure: 1 for row in act.rows if row.must is not None and row.must.words == SOME.words}
        found = Counter({**WHOLE, **seen, **GOOD.get(side.name, {}), **(figures if side.name == changed else {})})
        findings[side.name] = Findings(found)
    return complaints(act, findings)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.noun)
def test_a_run_without_a_fault_passes(act: Act) -> None:
    assert verdict(act) == []


@pytest.mark.parametrize(
    ("act", "side", "figure"),
    [(act, side.name, one) for act in ACTS for side in act.sides for one in FAILS[side.name].split()],
)
def test_any_fault_and_any_trouble_that_never_came_fails(act: Act, side: str, figure: str) -> None:
    name, _, value = figure.partition("=")
    assert len(verdict(act, side, **{name: int(value)})) == 1


@pytest.mark.parametrize(
    ("act", "side", "figures", "count"),
    [
        pytest.param(PAYOUTS, "park", {"parked": 0, "rows": 20}, 1, id="nothing was parked"),
        pytest.param(PAYOUTS, "park", {"rows": 20}, 0, id="a parked payout got as far as its row"),
        pytest.param(ORDERS, "direct", {"doubled": 0, "lost": 0}, 1, id="plain tasks did no damage"),
        pytest.param(ORDERS, "direct", {"doubled": 0}, 0, id="plain tasks lost something"),
        pytest.param(ORDERS, "direct", {"lost": 0}, 0, id="plain tasks doubled something"),
        pytest.param(CHARGES, "protected", {"outlived": 0, "one_writer": 1}, 0, id="one writer is never outlived"),
    ],
)
def test_a_figure_is_judged_by_the_others(act: Act, side: str, figures: dict[str, int], count: int) -> None:
    assert len(verdict(act, side, **figures)) == count


def test_a_complaint_says_where_what_and_what_must_be() -> None:
    found: Any = verdict(CHARGES, "protected", doubled=3)
    assert found == ["charges, protected: charged more than once: 3; must be 0."]


# The judgement: doubled, lost, wrong, unsettled, parked


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


def nonzero(found: Findings) -> dict[str, int]:
    """What was found, but for how many operations there were."""
    uninteresting = {"operations", "accepted", "declined", "expected"}
    return {name: value for name, value in found.figures.items() if value and name not in uninteresting}


def told(*answers: Answer, **more: Any) -> History:
    return History(charge(), answers=list(answers), **more)


FINE = {"effects": 1}
WRONG = {"effects": 1, "wrong": 1}
#: What the clients of one charge were told, the effects, and what must be found.
CHARGED: dict[str, tuple[History, dict[str, list[int]], dict[str, int]]] = {
    "one effect and one outcome": (
        told(created(), created(replayed=True), answers_to_changed=[REJECTED]),
        EFFECTS,
        FINE,
    ),
    "two effects, although every client was told the same": (
        told(created(), created()),
        {NAME: [7, 8]},
        {"effects": 2, "doubled": 1},
    ),
    "acknowledged without an effect": (told(created()), {}, {"lost": 1}),
    "neither acknowledged nor an effect": (told(gave_up=1), {}, {"unsettled": 1}),
    "an effect of another account under the same label": (
        told(created()),
        {f"bob/{LABEL}": [7]},
        {"effects": 1, "lost": 1, "ghosts": 1},
    ),
    "an effect that nobody has asked for": (
        told(created()),
        {**EFFECTS, "alice/run-alice-9": [9]},
        {"effects": 2, "ghosts": 1},
    ),
    "a client that gave up": (told(created(), gave_up=1), EFFECTS, {**FINE, "unsettled": 1}),
    **{
        f"an answer with another {what} than the first": (told(created(), other), EFFECTS, WRONG)
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
    "an answer of no charge, without an effect": (told(created(body=b"{}")), {}, {"lost": 1, "wrong": 1}),
    **{
        f"a changed payload that was {what}": (told(created(), answers_to_changed=[answer]), EFFECTS, WRONG)
        for what, answer in {
            "accepted": created(),
            "in progress": CONFLICT,
            "refused with another code": problem(422, "invalid"),
            "refused with another status": problem(409, "idempotency_key_reused"),
        }.items()
    },
    "named by the provider's number where it is our own that counts": (told(PAID), EFFECTS, WRONG),
    "unknown where nothing may be parked": (told(UNKNOWN), EFFECTS, {**WRONG, "parked": 1}),
}


@pytest.mark.parametrize(("history", "effects", "found"), CHARGED.values(), ids=CHARGED)
def test_what_is_found_of_a_charge(history: History, effects: Any, found: dict[str, int]) -> None:
    assert nonzero(judge(CHARGES, CHARGES.sides[0], [history], effects)) == found


PARKED = {"parked": 1}
PAYOUT: dict[str, tuple[History, dict[str, list[int]], dict[str, int]]] = {
    "named by the provider's number": (told(PAID), EFFECTS, FINE),
    "parked and unpaid": (told(UNKNOWN, UNKNOWN), {}, PARKED),
    "parked and paid": (told(UNKNOWN, UNKNOWN), EFFECTS, {**FINE, **PARKED}),
    "parked and paid twice": (told(UNKNOWN), {NAME: [7, 8]}, {**PARKED, "effects": 2, "doubled": 1}),
    "unknown to the second client": (told(PAID, UNKNOWN), EFFECTS, WRONG),
    "unknown to the first client": (told(UNKNOWN, PAID), EFFECTS, {**WRONG, **PARKED}),
}


@pytest.mark.parametrize(("history", "effects", "found"), PAYOUT.values(), ids=PAYOUT)
def test_what_is_found_of_a_payout_that_may_be_parked(history: History, effects: Any, found: dict[str, int]) -> None:
    findings = judge(PAYOUTS, PARK, [history], effects)
    assert nonzero(findings) == found
    assert findings.parked == [LABEL] * found.get("parked", 0)


DECLINED = Answer(status=402, content_type="application/json", location=None, body=b"{}")
SENT = {f"{message}.{LABEL}": 1 for message in MESSAGES}
RECEIPT_SENT, FEE_PAID = SENT


def orders(
    *answers: Answer, declined: Answer = DECLINED, charges: Any = EFFECTS, messages: Any = SENT, gave_up: int = 0
) -> Findings:
    """What is found of an order that is accepted and one that is declined."""
    histories = [
        History(charge(source="card"), answers=[] if gave_up else list(answers or (created(),)), gave_up=gave_up),
        History(charge(1, source="declined"), answers=[] if gave_up else [declined], gave_up=gave_up),
    ]
    return judge_messages(judge(ORDERS, OUTBOX, histories, charges), histories, messages)


BOTH = {"effects": 2}
ORDERED: dict[str, tuple[Findings, dict[str, int]]] = {
    "one effect for each message": (orders(created(), created()), BOTH),
    "two receipts": (orders(messages={**SENT, RECEIPT_SENT: 2}), {"effects": 3, "doubled": 1}),
    "two fees": (orders(messages={**SENT, FEE_PAID: 2}), {"effects": 3, "doubled": 1}),
    "no receipt": (orders(messages={**SENT, RECEIPT_SENT: 0}), {"effects": 1, "lost": 1}),
    "no fee": (orders(messages={RECEIPT_SENT: 1}), {"effects": 1, "lost": 1}),
    "a message of a declined order, twice": (
        orders(messages={**SENT, f"{MESSAGES[1]}.run-alice-1": 2}),
        {**BOTH, "ghosts": 2, "doubled": 1},
    ),
    "a message that nobody has ordered": (
        orders(messages={**SENT, f"{MESSAGES[0]}.run-alice-9": 1}),
        {**BOTH, "ghosts": 1},
    ),
    "two outcomes": (orders(created(), DECLINED), {**BOTH, "wrong": 1}),
    "declined and accepted": (orders(declined=created()), {**BOTH, "wrong": 2}),
    "charged twice": (orders(charges={NAME: [7, 8]}), {**BOTH, "wrong": 1}),
    "acknowledged and not charged": (orders(charges={}), {**BOTH, "wrong": 1}),
    "declined and charged": (orders(charges={**EFFECTS, "alice/run-alice-1": [9]}), {**BOTH, "wrong": 1}),
    "clients that gave up": (orders(charges={}, messages={}, gave_up=1), {"unsettled": 2}),
}


@pytest.mark.parametrize(("findings", "found"), ORDERED.values(), ids=ORDERED)
def test_what_is_found_of_an_accepted_and_a_declined_order(findings: Findings, found: dict[str, int]) -> None:
    assert nonzero(findings) == found
    assert (findings.figures["accepted"], findings.figures["declined"], findings.figures["expected"]) == (1, 1, 2)


def test_the_first_few_of_each_kind_are_shown_with_their_names() -> None:
    histories = [told(created(8), gave_up=1) for _ in range(5)]
    found = judge(CHARGES, CHARGES.sides[0], histories, {NAME: [7, 7], **{f"bob/{n}": [n] for n in range(5)}})
    assert Counter(example.partition(" ")[0] for example in found.examples) == {
        "doubled:": 1,
        "not": 3,
        "wrong:": 3,
        "never": 3,
    }
    assert f"wrong: {NAME} (calm) was answered 201" in "\n".join(found.examples)
    assert f"never learned: {NAME}" in found.examples


@pytest.mark.parametrize(("status", "acknowledged"), [(199, False), (200, True), (299, True), (300, False)])
def test_a_success_is_an_acknowledgement_and_nothing_else_is(status: int, acknowledged: bool) -> None:
    assert told(CONFLICT, created(status=status)).acknowledged == acknowledged
