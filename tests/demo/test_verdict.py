"""The demo's storms include every trouble, and its verdict detects every fault and every missing trouble."""

from collections import Counter

import pytest
from httpx import Response

from testproject.demo.charges import FEWEST, Charge, Trouble
from testproject.demo.client import History
from testproject.demo.verdict import CHARGES, ORDERS, PAYMENTS, ROWS, Findings, complaints, judge


@pytest.mark.parametrize("is_order", [False, True])
def test_the_smallest_storm_has_every_trouble(is_order):
    storm = [Charge(number, str(number), is_order) for number in range(FEWEST)]
    assert {charge.trouble for charge in storm} == set(Trouble)
    assert any(charge.is_sent_late for charge in storm)
    assert any(charge.is_sent_changed for charge in storm) is not is_order
    assert any(charge.declined for charge in storm) is is_order


GOOD = {"expected": 20, "effects": 20, "charged": 20}
CONTROL = {"expected": 20, "effects": 30, "charged": 20, "doubled": 10, "ghosts": 5, "wrong": 9}
FAULTS = "doubled=1 lost=1 wrong=1 unsettled=1 effects=19 effects=21 cut=0 replay=0 kills=0"
#: Single figures that fail a storm, at the protected endpoint and at its twin.
STORMS = {
    CHARGES: (f"{FAULTS} key_reused=0 take_overs=0", "doubled=0"),
    PAYMENTS: (f"{FAULTS} key_reused=0 take_overs=0 charged=21", "doubled=0 charged=21"),
    ORDERS: (f"{FAULTS} ghosts=1 relay=0 worker=0 redis=0", "doubled=0 ghosts=0"),
}


def verdict(storm, protected="", unprotected=""):
    """The complaints about a good run with one changed figure."""
    rows = [row for row in ROWS if storm in row.storms]
    troubles = {row.figure: 1 for row in rows if row.must == "more than 0"}
    findings = []
    for good, changed in ((GOOD, protected), (CONTROL, unprotected)):
        name, _, value = changed.partition("=")
        findings.append(Findings(Counter({**good, **troubles, **({name: int(value)} if name else {})})))
    return complaints(rows, *findings)


@pytest.mark.parametrize("storm", STORMS)
def test_any_fault_and_any_missing_trouble_fails(storm):
    assert verdict(storm) == []
    of_protected, of_unprotected = STORMS[storm]
    for changed in of_protected.split():
        assert len(verdict(storm, changed)) == 1, changed
    for changed in of_unprotected.split():
        assert len(verdict(storm, unprotected=changed)) == 1, changed
    assert verdict(storm, "doubled=3") == ["protected: more than one effect: 3; must be 0."]


# The verdict on one charge: doubled, lost, wrong, unsettled

LABEL = "run-0"
EFFECTS = {LABEL: [7]}
DECLINED = Response(402, json={})


def created(pk=7, status=201, **headers):
    return Response(status, json={"id": pk}, headers={"Location": f"/charges/{pk}/", **headers})


def problem(status, code):
    return Response(status, json={"code": code}, headers={"Content-Type": "application/problem+json"})


def answered(*answers, **more):
    return History(Charge(0, LABEL), answers=list(answers), **more)


def nonzero(found):
    return {name: value for name, value in found.figures.items() if value and name != "expected"}


FINE, WRONG = {"effects": 1}, {"effects": 1, "wrong": 1}
REPLAY = created(**{"Idempotency-Replayed": "true"})
#: The answers to the clients of one charge, the effects, and the expected findings.
CHARGED = {
    "one outcome": (
        answered(created(), REPLAY, answers_to_changed=[problem(422, "idempotency_key_reused")]),
        EFFECTS,
        FINE,
    ),
    "two effects, although every client got the same answer": (
        answered(created(), REPLAY),
        {LABEL: [7, 8]},
        {"effects": 2, "doubled": 1},
    ),
    "acknowledged without an effect": (answered(created()), {}, {"lost": 1}),
    "neither acknowledged nor an effect": (answered(gave_up=1), {}, {"unsettled": 1}),
    "refused without an effect": (answered(problem(409, "idempotency_in_progress")), {}, {"wrong": 1}),
    "an effect without a request": (answered(created()), {**EFFECTS, "run-9": [9]}, {"effects": 2, "ghosts": 1}),
    "a client that gave up": (answered(created(), gave_up=1), EFFECTS, {**FINE, "unsettled": 1}),
    **{
        f"another {what} than the first": (answered(created(), other), EFFECTS, WRONG)
        for what, other in {
            "effect": created(8),
            "status": created(status=200),
            "location": created(Location="/charges/8/"),
            "type": created(**{"Content-Type": "text/html"}),
            "spelling": Response(201, content=b'{"id":  7}', headers=created().headers),
            "outcome, still in progress": problem(409, "idempotency_in_progress"),
        }.items()
    },
    "another status, although it names the effect": (answered(created(status=200)), EFFECTS, WRONG),
    **{
        f"an answer that does not name the effect: {body!r}": (answered(Response(201, content=body)), EFFECTS, WRONG)
        for body in (b'{"id": 9}', b"{}", b"not json", b"[]")
    },
    **{
        f"a changed payload that was {what}": (answered(created(), answers_to_changed=[answer]), EFFECTS, WRONG)
        for what, answer in {
            "accepted": created(),
            "refused with another code": problem(422, "invalid"),
            "refused with another status": problem(409, "idempotency_key_reused"),
        }.items()
    },
}


@pytest.mark.failure_118
@pytest.mark.parametrize(("history", "effects", "found"), CHARGED.values(), ids=CHARGED)
def test_the_findings_on_a_charge(history, effects, found):
    assert nonzero(judge([history], effects)) == found


#: How an accepted and a declined order differ from good ones, and the expected findings.
ORDERED = {
    "one receipt": ({"answers": [created(), REPLAY]}, FINE),
    "two receipts": ({"receipts": {LABEL: 2}}, {"effects": 2, "doubled": 1}),
    "no receipt": ({"receipts": {}}, {"lost": 1}),
    "a receipt of a declined order": ({"receipts": {LABEL: 1, "run-5": 1}}, {"effects": 2, "ghosts": 1}),
    "two outcomes": ({"answers": [created(), DECLINED]}, WRONG),
    "declined and accepted": ({"declined": [created()]}, WRONG),
    "charged twice": ({"charges": {LABEL: [7, 8]}}, WRONG),
    "acknowledged and not charged": ({"charges": {}}, WRONG),
    "declined and charged": ({"charges": {**EFFECTS, "run-5": [9]}}, WRONG),
}


@pytest.mark.parametrize(("differs", "found"), ORDERED.values(), ids=ORDERED)
def test_the_findings_on_an_accepted_and_a_declined_order(differs, found):
    good = {"answers": [created()], "declined": [DECLINED], "charges": EFFECTS, "receipts": {LABEL: 1}}
    orders = {**good, **differs}
    histories = [
        History(Charge(0, LABEL, is_order=True), answers=orders["answers"]),
        History(Charge(5, "run-5", is_order=True), answers=orders["declined"]),
    ]
    findings = judge(histories, orders["charges"], orders["receipts"])
    assert (nonzero(findings), findings.figures["expected"]) == (found, 1)


def test_the_first_few_of_each_kind_are_shown_with_their_names():
    histories = [answered(created(8), gave_up=1) for _ in range(5)]
    found = judge(histories, {LABEL: [7, 7], **{f"other-{number}": [number] for number in range(5)}})
    kinds = Counter(example.partition(" ")[0] for example in found.examples)
    assert kinds == {"doubled:": 1, "not": 3, "wrong:": 3, "never": 3}
    assert f"wrong: {LABEL} (kill_at_work) was answered 201" in "\n".join(found.examples)
