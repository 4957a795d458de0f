"""The demo's last part: the plan of its orders, and how the effects of their messages are judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from testproject.demo.client import Answer
from testproject.demo.orders import (
    DIRECT,
    FEE,
    MESSAGES,
    OUTBOX,
    RECEIPT,
    SIDES,
    STRIKES,
    Kill,
    Order,
    draw_orders,
    strikes_of,
)
from testproject.demo.plan import MIN_ORDERS, Plan, Trouble
from testproject.demo.tally import Seen
from testproject.demo.verdict import History, HopFindings, hop_complaints, judge_orders


class TestPlan:
    @pytest.mark.parametrize("seed", range(20))
    def test_the_fewest_orders_meet_every_trouble_and_every_strike(self, seed: int) -> None:
        for side in SIDES:
            orders = draw_orders(Plan(orders=MIN_ORDERS, seed=seed), side, "run")
            assert len(orders) == MIN_ORDERS
            assert {order.trouble for order in orders} >= {
                *(Trouble.CALM, Trouble.TIMEOUT, Trouble.CUT, Trouble.BURST),
                *(Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY),
            }
            assert any(order.declined for order in orders)
            assert not any(order.changed_payload for order in orders)
            struck = [order for order in orders if order.strike is not None]
            assert Counter((order.strike, order.struck) for order in struck) == Counter(STRIKES[side])
            assert not any(order.declined for order in struck)

    def test_both_sides_send_the_same_under_names_of_their_own(self) -> None:
        drawn = [draw_orders(Plan(orders=100), side, "run") for side in SIDES]
        alike = [[(order.amount, order.trouble, order.declined, order.account) for order in orders] for orders in drawn]
        assert alike[0] == alike[1]
        assert not {order.label for order in drawn[0]} & {order.label for order in drawn[1]}

    def test_more_orders_meet_more_strikes(self) -> None:
        orders = draw_orders(Plan(orders=400), OUTBOX, "run")
        assert len(strikes_of(orders)) > len(STRIKES[OUTBOX])


def order(label: str, **changes: Any) -> Order:
    values = {"number": 0, "account": "alice", "key": label, "label": label, "amount": 500, "trouble": Trouble.CALM}
    values |= {"burst": 1, "late_duplicate": False, "changed_payload": False}
    return Order(**{**values, **changes})  # type: ignore[arg-type]


CREATED = Answer(status=201, content_type="application/json", location=None, body=b'{"id": 7}')
DECLINED = Answer(status=402, content_type="application/json", location=None, body=b"{}")
CHARGES = {("alice", "good"): [7]}
EFFECTS = {("good", RECEIPT): 1, ("good", FEE): 1}


def histories(*answers: Answer, declined: Answer = DECLINED) -> list[History]:
    return [
        History(order("good"), answers=list(answers or (CREATED,))),
        History(order("bad", declined=True), answers=[declined]),
    ]


class TestJudgement:
    def test_one_effect_for_each_message_of_an_accepted_order_passes(self) -> None:
        found = judge_orders(histories(CREATED, CREATED), CHARGES, EFFECTS)
        assert found == HopFindings(
            accepted=1,
            declined=1,
            expected=2,
            effects=2,
            doubled=0,
            lost=0,
            of_declined=0,
            wrong=0,
            unsettled=0,
        )

    @pytest.mark.parametrize("message", MESSAGES)
    def test_a_message_with_two_effects_is_doubled(self, message: str) -> None:
        found = judge_orders(histories(), CHARGES, {**EFFECTS, ("good", message): 2})
        assert (found.effects, found.doubled, found.lost) == (3, 1, 0)

    @pytest.mark.parametrize("message", MESSAGES)
    def test_a_message_without_an_effect_is_lost(self, message: str) -> None:
        found = judge_orders(histories(), CHARGES, {**EFFECTS, ("good", message): 0})
        assert (found.effects, found.doubled, found.lost) == (1, 0, 1)

    def test_an_effect_of_a_declined_order_is_found(self) -> None:
        found = judge_orders(histories(), CHARGES, {**EFFECTS, ("bad", FEE): 1})
        assert (found.effects, found.of_declined) == (2, 1)

    def test_an_effect_that_nobody_has_ordered_shows_in_the_count(self) -> None:
        assert judge_orders(histories(), CHARGES, {**EFFECTS, ("other", FEE): 1}).effects == 3

    @pytest.mark.parametrize(
        ("told", "declined", "charges"),
        [
            ([CREATED, DECLINED], DECLINED, CHARGES),
            ([CREATED], CREATED, CHARGES),
            ([CREATED], DECLINED, {("alice", "good"): [7, 8]}),
            ([CREATED], DECLINED, {**CHARGES, ("alice", "bad"): [9]}),
        ],
        ids=["two outcomes", "declined and accepted", "charged twice", "declined and charged"],
    )
    def test_a_wrong_answer_or_charge_is_found(self, told: list[Answer], declined: Answer, charges: Any) -> None:
        assert judge_orders(histories(*told, declined=declined), charges, EFFECTS).wrong >= 1

    def test_a_client_that_gave_up_is_reported(self) -> None:
        given_up = [History(order("good"), gave_up=1), History(order("bad", declined=True), gave_up=1)]
        found = judge_orders(given_up, {}, {})
        assert (found.unsettled, found.lost) == (2, 0)  # nobody was told of it


GOOD = HopFindings(
    accepted=20, declined=4, expected=40, effects=40, doubled=0, lost=0, of_declined=0, wrong=0, unsettled=0
)
CONTROL = replace(GOOD, effects=60, doubled=18, lost=1, of_declined=5, wrong=9)
ALL_KILLED = dict.fromkeys(Kill, 1)


def verdict(
    changed: dict[str, int] | None = None,
    control: HopFindings = CONTROL,
    kills: dict[Kill, int] = ALL_KILLED,
    killed_at_work: int = 1,
    replays: int = 1,
) -> list[str]:
    findings = {OUTBOX.name: replace(GOOD, **(changed or {})), DIRECT.name: control}
    return hop_complaints(findings, kills, {Seen.KILLED_AT_WORK: killed_at_work}, replays)


class TestVerdict:
    def test_a_run_without_a_fault_passes(self) -> None:
        assert verdict() == []

    @pytest.mark.parametrize(
        "fault",
        [
            *({"effects": 39}, {"effects": 41}, {"doubled": 1}, {"lost": 1}),
            *({"of_declined": 1}, {"wrong": 1}, {"unsettled": 1}),
        ],
    )
    def test_any_fault_fails(self, fault: dict[str, int]) -> None:
        assert len(verdict(fault)) == 1

    @pytest.mark.parametrize("never", list(Kill))
    def test_a_run_in_which_somebody_was_never_killed_fails(self, never: Kill) -> None:
        assert len(verdict(kills={**ALL_KILLED, never: 0})) == 1
        assert len(verdict(killed_at_work=0)) == 1

    def test_a_run_in_which_no_message_came_again_fails(self) -> None:
        assert len(verdict(replays=0)) == 1

    def test_a_control_that_met_no_trouble_fails(self) -> None:
        assert len(verdict(control=replace(CONTROL, doubled=0, lost=0))) == 1
        assert len(verdict(control=replace(CONTROL, of_declined=0))) == 1
        assert verdict(control=replace(CONTROL, doubled=0)) == []
