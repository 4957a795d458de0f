"""The demo's plan: what a seed draws, and the options that it is made from."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import pytest

from testproject.demo.hop import STRIKES, UNPROTECTED_STRIKES, strikes_of
from testproject.demo.plan import Plan, Trouble, add_arguments, draw, plan_from


def parsed(*options: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return plan_from(vars(parser.parse_args(options)))


def test_the_same_seed_draws_the_same_storm_under_other_names() -> None:
    assert draw(Plan(seed=5), "run") == draw(Plan(seed=5), "run")
    assert draw(Plan(seed=5), "run") != draw(Plan(seed=6), "run")
    for orders in (False, True):
        one, other = ([asdict(charge) for charge in draw(Plan(), run, orders=orders)] for run in ("one", "other"))
        assert not {charge["label"] for charge in one} & {charge["label"] for charge in other}
        for name in ("key", "label"):
            assert len({charge.pop(name) for charge in one}) == len({charge.pop(name) for charge in other}) == len(one)
        assert one == other


@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_storm_has_every_trouble_and_every_strike(seed: int) -> None:
    smallest = parsed("--operations", "20", "--orders", "24", "--seed", str(seed))
    charges, orders = draw(smallest, "run"), draw(smallest, "run", orders=True)
    assert {charge.trouble for charge in charges} == {order.trouble for order in orders} == set(Trouble)
    assert any(charge.changed_payload for charge in charges)
    assert any(order.declined for order in orders)
    assert not any(order.changed_payload for order in orders)
    for planned in (STRIKES, UNPROTECTED_STRIKES):
        strikes = strikes_of(orders, planned)
        assert [(strike.place, strike.act) for strike in strikes] == [*planned]
        struck = {strike.label for strike in strikes}
        assert len(struck) == len(planned)
        assert not struck & {order.label for order in orders if order.declined}


def test_a_changed_payload_asks_for_another_amount_and_nothing_else() -> None:
    own, changed = (json.loads(draw(Plan(), "run")[0].payload(changed=changed)) for changed in (False, True))
    assert changed == {**own, "amount": own["amount"] + 1}


@pytest.mark.parametrize("options", [["--operations", "19"], ["--orders", "23"], ["--time-limit", "x"]])
def test_an_option_out_of_its_bounds_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*options)
