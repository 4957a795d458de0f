"""The demo's verdict: a fault fails it, and so does a trouble that never came."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from testproject.demo.acts import ACTS, CHARGES, ORDERS, PAYOUTS, SOME, Act
from testproject.demo.verdict import Findings, complaints

WHOLE = {"operations": 20, "accepted": 20, "expected": 20, "effects": 20, "rows": 20}
#: What a good run has where it differs from a side without a fault: the control's damage, and what PARK parks.
GOOD: dict[str, dict[str, int]] = {
    "unprotected": {"effects": 30, "doubled": 10, "wrong": 9},
    "park": {"effects": 18, "parked": 2, "rows": 18},
    "control": {"effects": 30, "doubled": 10, "wrong": 9},
    "direct": {"effects": 30, "doubled": 8, "lost": 1, "ghosts": 5, "wrong": 9},
}
FAULTS = {"doubled": (1,), "lost": (1,), "wrong": (1,), "unsettled": (1,)}
DECLARED = {**FAULTS, "killed_at_work": (0,), "provider_failed": (0,)}
#: Each of these figures, on that side, fails the run.
FAILS: dict[str, dict[str, tuple[int, ...]]] = {
    "protected": {
        **FAULTS,
        **dict.fromkeys(("cut", "timeout", "replay", "conflict", "key_reused", "killed_at_work", "outlived"), (0,)),
        "effects": (19, 21),
        "take_overs": (0,),
        "kills": (0,),
    },
    "unprotected": {"doubled": (0,)},
    "reexecute": {
        **DECLARED,
        "effects": (19, 21),
        "parked": (1,),
        "rows": (18, 21),
        "take_overs": (0,),
        "deduplicated": (0,),
    },
    "reconcile": {**DECLARED, "effects": (19, 21), "parked": (1,), "rows": (18, 21), "reconciled": (0,)},
    "park": {**DECLARED, "rows": (17, 21)},
    "control": {"doubled": (0,)},
    "outbox": {
        **FAULTS,
        "effects": (19, 21),
        "ghosts": (1,),
        "replays": (0,),
        "killed_at_work": (0,),
        **dict.fromkeys(("relays", "children", "workers", "brokers"), (0,)),
    },
    "direct": {"ghosts": (0,)},
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
    ("act", "side", "figure", "value"),
    [
        pytest.param(act, side.name, figure, value, id=f"{side.name}-{figure}-{value}")
        for act in ACTS
        for side in act.sides
        for figure, values in FAILS[side.name].items()
        for value in values
    ],
)
def test_any_fault_and_any_trouble_that_never_came_fails(act: Act, side: str, figure: str, value: int) -> None:
    assert len(verdict(act, side, **{figure: value})) == 1


def test_where_nothing_was_parked_there_was_nothing_to_park() -> None:
    assert len(verdict(PAYOUTS, "park", parked=0, rows=20)) == 1


def test_a_parked_payout_may_have_got_as_far_as_its_row() -> None:
    assert verdict(PAYOUTS, "park", rows=20) == []


@pytest.mark.parametrize(("damage", "count"), [({"doubled": 0, "lost": 0}, 1), ({"doubled": 0}, 0), ({"lost": 0}, 0)])
def test_plain_tasks_must_double_or_lose_something(damage: dict[str, int], count: int) -> None:
    assert len(verdict(ORDERS, "direct", **damage)) == count


def test_nobody_can_outlive_a_take_over_where_one_writes_at_a_time() -> None:
    assert verdict(CHARGES, "protected", outlived=0, one_writer=1) == []


def test_a_complaint_says_where_what_and_what_must_be() -> None:
    found: Any = verdict(CHARGES, "protected", doubled=3)
    assert found == ["charges, protected: charged more than once: 3; must be 0."]
