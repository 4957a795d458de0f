"""The demo's plan: what a seed draws, and the options that it is made from."""

from __future__ import annotations

import argparse
import json

import pytest

from testproject.demo.payouts import KINDS, SIDES, draw_payouts
from testproject.demo.plan import MIN_PAYOUTS, Plan, Trouble, add_arguments, arguments_of, draw_charges, plan_from


class TestPlan:
    def test_the_same_seed_draws_the_same_storm(self) -> None:
        assert draw_charges(Plan(seed=5), "run") == draw_charges(Plan(seed=5), "run")
        assert draw_charges(Plan(seed=5), "run") != draw_charges(Plan(seed=6), "run")

    @pytest.mark.parametrize("seed", range(20))
    def test_the_smallest_storm_has_every_trouble(self, seed: int) -> None:
        charges = draw_charges(Plan(operations=20, seed=seed), "run")
        assert len(charges) == 20
        assert {charge.trouble for charge in charges} == set(Trouble)
        assert any(charge.changed_payload for charge in charges)
        keys = [charge.key for charge in charges]
        assert len(set(keys)) < len(keys), "no key is shared by two accounts"

    @pytest.mark.parametrize("seed", range(20))
    def test_the_fewest_payouts_have_every_trouble_and_the_same_on_each_side(self, seed: int) -> None:
        plan = Plan(payouts=MIN_PAYOUTS, seed=seed)
        drawn = {side.name: draw_payouts(plan, side, "run") for side in SIDES}
        assert {(payout.trouble, payout.fault) for payout in drawn["park"]} == set(KINDS)
        kinds = [[(payout.trouble, payout.fault, payout.amount) for payout in payouts] for payouts in drawn.values()]
        assert all(other == kinds[0] for other in kinds)
        labels = [payout.label for payouts in drawn.values() for payout in payouts]
        assert len(set(labels)) == MIN_PAYOUTS * len(SIDES)

    def test_a_changed_payout_asks_for_another_amount_and_the_same_fault(self) -> None:
        payout = draw_payouts(Plan(), SIDES[0], "run")[0]
        own, changed = (json.loads(payout.payload(changed=changed)) for changed in (False, True))
        assert changed == {**own, "amount": own["amount"] + 1}

    def test_an_account_never_uses_a_key_twice(self) -> None:
        charges = draw_charges(Plan(operations=5000), "run")
        scopes = {(charge.account, charge.key) for charge in charges}
        assert len(scopes) == len({charge.label for charge in charges}) == 5000

    def test_options_survive_the_way_to_the_process_that_runs_the_storm(self) -> None:
        plan = Plan(
            operations=77,
            payouts=33,
            orders=44,
            workers=3,
            concurrency=9,
            kill_every=0.5,
            lease=3,
            time_limit=9.5,
            seed=-4,
        )
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        assert plan_from(vars(parser.parse_args(arguments_of(plan)))) == plan

    @pytest.mark.parametrize(
        "options",
        [["--operations", "19"], ["--payouts", "23"], ["--orders", "23"], ["--workers", "0"], ["--lease", "x"]],
    )
    def test_an_option_out_of_its_bounds_is_refused(self, options: list[str]) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        with pytest.raises(SystemExit):
            parser.parse_args(options)
