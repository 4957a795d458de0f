"""The demo's verdict: a fault fails it, and so does a trouble that never came."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testproject.demo.payouts import SIDES
from testproject.demo.tally import Seen
from testproject.demo.verdict import Findings, complaints, payout_complaints

GOOD = {"operations": 20, "effects": 20, "doubled": 0, "lost": 0, "wrong": 0, "unsettled": 0}
CONTROL = Findings(**{**GOOD, "effects": 30, "doubled": 10, "wrong": 9})
ALL_SEEN = dict.fromkeys(Seen, 1)


class TestVerdict:
    def test_a_run_without_a_fault_passes(self) -> None:
        assert complaints(Findings(**GOOD), CONTROL, ALL_SEEN, kills=3, take_overs=2, can_be_outlived=True) == []

    @pytest.mark.parametrize(
        ("fault", "value"),
        [("effects", 19), ("effects", 21), ("doubled", 1), ("lost", 1), ("wrong", 1), ("unsettled", 1)],
    )
    def test_any_fault_on_the_protected_side_fails(self, fault: str, value: int) -> None:
        found = Findings(**{**GOOD, fault: value})
        assert len(complaints(found, CONTROL, ALL_SEEN, kills=3, take_overs=2, can_be_outlived=True)) == 1

    @pytest.mark.parametrize(
        "never",
        [Seen.KILLED_AT_WORK, Seen.OUTLIVED, Seen.CUT, Seen.TIMEOUT, Seen.REPLAY, Seen.CONFLICT, Seen.KEY_REUSED],
    )
    def test_a_storm_in_which_a_trouble_never_came_fails(self, never: Seen) -> None:
        seen = {**ALL_SEEN, never: 0}
        assert len(complaints(Findings(**GOOD), CONTROL, seen, kills=3, take_overs=2, can_be_outlived=True)) == 1

    @pytest.mark.parametrize(("kills", "take_overs"), [(0, 2), (3, 0)])
    def test_a_storm_without_a_killed_worker_or_a_take_over_fails(self, kills: int, take_overs: int) -> None:
        assert (
            len(
                complaints(
                    Findings(**GOOD), CONTROL, ALL_SEEN, kills=kills, take_overs=take_overs, can_be_outlived=True
                )
            )
            == 1
        )

    def test_a_control_that_doubled_nothing_fails(self) -> None:
        assert (
            len(complaints(Findings(**GOOD), Findings(**GOOD), ALL_SEEN, kills=3, take_overs=2, can_be_outlived=True))
            == 1
        )


def payout_verdict(
    changed: dict[str, Any] | None = None,
    *,
    rows: dict[str, int] | None = None,
    unseen: tuple[str, Seen] | None = None,
    again: int = 1,
    deduplicated: int = 1,
) -> list[str]:
    """The complaints about a good run of payouts that differs as given; ``changed`` is one side's findings."""
    findings = {side.name: Findings(**GOOD) for side in SIDES}
    findings["park"] = Findings(**{**GOOD, "effects": 18, "parked": ("run-0", "run-1")})
    findings["control"] = CONTROL
    for name, changes in (changed or {}).items():
        findings[name] = replace(findings[name], **changes)
    seen = {side.name: dict(ALL_SEEN) for side in SIDES}
    if unseen is not None:
        seen[unseen[0]][unseen[1]] = 0
    counted = {side.name: 20 for side in SIDES} | {"park": 18} | (rows or {})
    return payout_complaints(findings, counted, seen, again, deduplicated)


DECLARED = ["reexecute", "reconcile", "park"]


class TestVerdictOnPayouts:
    def test_a_run_without_a_fault_passes(self) -> None:
        assert payout_verdict() == []

    @pytest.mark.parametrize("side", DECLARED)
    @pytest.mark.parametrize("fault", ["doubled", "lost", "wrong", "unsettled"])
    def test_any_fault_under_any_declaration_fails(self, side: str, fault: str) -> None:
        assert len(payout_verdict({side: {fault: 1}})) == 1

    @pytest.mark.parametrize("side", ["reexecute", "reconcile"])
    @pytest.mark.parametrize("fault", [{"effects": 19}, {"effects": 21}, {"parked": ("run-0",)}])
    def test_where_nothing_may_be_parked_every_payout_is_made(self, side: str, fault: dict[str, Any]) -> None:
        assert len(payout_verdict({side: fault})) == 1

    @pytest.mark.parametrize("rows", [{"reexecute": 19}, {"reconcile": 21}, {"park": 17}, {"park": 21}])
    def test_an_acknowledged_payout_has_one_row(self, rows: dict[str, int]) -> None:
        assert len(payout_verdict(rows=rows)) == 1

    def test_a_parked_payout_may_have_got_as_far_as_its_row(self) -> None:
        assert payout_verdict(rows={"park": 20}) == []

    @pytest.mark.parametrize("side", DECLARED)
    @pytest.mark.parametrize("never", [Seen.KILLED_AT_WORK, Seen.PROVIDER_FAILED])
    def test_a_declaration_that_met_no_trouble_fails(self, side: str, never: Seen) -> None:
        assert len(payout_verdict(unseen=(side, never))) == 1

    def test_a_reconciler_that_never_found_anything_fails(self) -> None:
        assert len(payout_verdict(unseen=("reconcile", Seen.RECONCILED))) == 1

    @pytest.mark.parametrize("never", [{"again": 0}, {"deduplicated": 0}])
    def test_a_derived_key_that_was_never_used_again_fails(self, never: dict[str, int]) -> None:
        assert len(payout_verdict(**never)) == 1

    def test_a_run_in_which_nothing_was_parked_fails(self) -> None:
        assert len(payout_verdict({"park": {"parked": ()}}, rows={"park": 20})) == 1

    def test_a_control_that_doubled_nothing_fails(self) -> None:
        assert len(payout_verdict({"control": {"doubled": 0}})) == 1
