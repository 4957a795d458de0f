"""The demo's plan: what a seed draws, and the options that it is made from."""

from __future__ import annotations

import argparse
import json
from collections import Counter

import pytest

from testproject.demo.acts import CHARGES, DIRECT, ORDERS, OUTBOX, PAYOUT_KINDS, PAYOUTS, STRIKES, Act, strikes_of
from testproject.demo.plan import Plan, Trouble, arguments_of, plan_from
from testproject.demo.plan import add_arguments as add_arguments_to


def smallest(seed: int) -> Plan:
    return parsed("--operations", "20", "--payouts", "24", "--orders", "24", "--seed", str(seed))


def test_the_same_seed_draws_the_same_storm() -> None:
    side = CHARGES.sides[0]
    assert CHARGES.draw(Plan(seed=5), side, "run") == CHARGES.draw(Plan(seed=5), side, "run")
    assert CHARGES.draw(Plan(seed=5), side, "run") != CHARGES.draw(Plan(seed=6), side, "run")


@pytest.mark.parametrize("act", [CHARGES, PAYOUTS, ORDERS], ids=lambda act: act.noun)
def test_all_sides_send_the_same_under_names_of_their_own(act: Act) -> None:
    drawn = [act.draw(Plan(), side, "run") for side in act.sides]
    alike = [[(one.amount, one.trouble, one.account, one.more) for one in charges] for charges in drawn]
    assert all(other == alike[0] for other in alike)
    labels = [one.label for charges in drawn for one in charges]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_storm_has_every_trouble(seed: int) -> None:
    charges = CHARGES.draw(smallest(seed), CHARGES.sides[0], "run")
    assert len(charges) == 20
    assert {charge.trouble for charge in charges} == set(Trouble)
    assert any(charge.changed_payload for charge in charges)
    assert len({charge.key for charge in charges}) < len(charges), "no key is shared by two accounts"
    payouts = PAYOUTS.draw(smallest(seed), PAYOUTS.sides[0], "run")
    drawn = {(payout.trouble, payout.more["fault"]) for payout in payouts}
    assert drawn == {(trouble, more["fault"]) for trouble, more in PAYOUT_KINDS}


@pytest.mark.parametrize("seed", range(20))
def test_the_fewest_orders_meet_every_trouble_and_every_strike(seed: int) -> None:
    for side in ORDERS.sides:
        orders = ORDERS.draw(smallest(seed), side, "run")
        assert {order.trouble for order in orders} == set(Trouble) - {Trouble.STALL}
        assert any(order.declined for order in orders)
        assert not any(order.changed_payload for order in orders)
        strikes = strikes_of(side, orders)
        planned = Counter((one.place, one.act, one.label.partition(".")[0]) for one in strikes)
        assert planned == Counter(STRIKES[side])
        assert not {one.label.partition(".")[2] for one in strikes} & {one.label for one in orders if one.declined}


def test_more_orders_meet_more_strikes() -> None:
    for side in (OUTBOX, DIRECT):
        assert len(strikes_of(side, ORDERS.draw(Plan(orders=400), side, "run"))) > len(STRIKES[side])


def test_a_changed_payout_asks_for_another_amount_and_the_same_fault() -> None:
    payout = PAYOUTS.draw(Plan(), PAYOUTS.sides[0], "run")[0]
    own, changed = (json.loads(payout.payload(changed=changed)) for changed in (False, True))
    assert changed == {**own, "amount": own["amount"] + 1}


def test_an_account_never_uses_a_key_twice() -> None:
    charges = CHARGES.draw(Plan(operations=5000), CHARGES.sides[0], "run")
    scopes = {(charge.account, charge.key) for charge in charges}
    assert len(scopes) == len({charge.label for charge in charges}) == 5000


def parsed(*options: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_arguments_to(parser)
    return plan_from(vars(parser.parse_args(options)))


def test_options_survive_the_way_to_the_process_that_runs_the_storm() -> None:
    plan = Plan(
        operations=77, payouts=33, orders=44, workers=3, concurrency=9, kill_every=0.5, lease=3, time_limit=9.5, seed=-4
    )
    assert parsed(*arguments_of(plan)) == plan
    assert parsed() == Plan()


@pytest.mark.parametrize(
    "options", [["--operations", "19"], ["--payouts", "23"], ["--orders", "23"], ["--workers", "0"], ["--lease", "x"]]
)
def test_an_option_out_of_its_bounds_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*options)
