"""The payouts of the demo: the endpoints they go to, one a declaration, and the trouble that each will meet.

A payout is a charge whose effect is at a provider, so clients, storm and judgement are those of the charges. On top of
the network's and the server's trouble comes the provider's: it fails, or falls silent, after it has paid or before.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from .plan import Charge, Plan, Trouble, charges_with

CONTROL = "control"


@dataclass(frozen=True)
class Side:
    """An endpoint and what it declares."""

    name: str
    title: str
    path: str
    may_park: bool = False


REEXECUTED = Side("reexecute", "REEXECUTE", "/payouts/reexecute/")
SIDES = (
    REEXECUTED,
    Side("reconcile", "Reconcile", "/payouts/"),
    Side("park", "PARK", "/payouts/park/", may_park=True),
    Side(CONTROL, "unprotected", "/unprotected/payouts/"),
)

#: What a payout meets: on the network or in the server, and at the provider. Each comes up as often as the others.
KINDS: tuple[tuple[Trouble, str], ...] = (
    (Trouble.CALM, ""),
    (Trouble.TIMEOUT, ""),
    (Trouble.CUT, ""),
    (Trouble.BURST, ""),
    (Trouble.KILL_AT_WORK, ""),
    (Trouble.KILL_AT_REPLY, ""),
    (Trouble.CALM, "succeed_then_hang"),
    (Trouble.BURST, "succeed_then_hang"),
    (Trouble.CALM, "error_after_success"),
    (Trouble.CALM, "late"),
    (Trouble.CALM, "hang"),
    (Trouble.CALM, "error_before"),
)


@dataclass(frozen=True)
class Payout(Charge):
    """One logical payout."""

    fault: str = ""  # what the provider is asked to do to the first call

    def payload(self, *, changed: bool = False) -> bytes:
        amount = self.amount + 1 if changed else self.amount
        return json.dumps({"amount": amount, "label": self.label, "fault": self.fault}).encode()


def draw_payouts(plan: Plan, side: Side, run: str) -> list[Payout]:
    """The payouts of a side: the same for each, but for their keys and labels."""
    chance = random.Random(f"{plan.seed}:payouts")
    kinds = (list(KINDS) * (plan.payouts // len(KINDS) + 1))[: plan.payouts]
    chance.shuffle(kinds)
    charges = charges_with([trouble for trouble, _ in kinds], chance, run_of(side, run))
    return [Payout(**vars(charge), fault=fault) for charge, (_, fault) in zip(charges, kinds, strict=True)]


def run_of(side: Side, run: str) -> str:
    """The beginning of a side's keys and labels, which no other's begins with."""
    return f"{run}.{side.name}"
