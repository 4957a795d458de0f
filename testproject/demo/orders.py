"""The orders of the demo: what leaves the server through a broker, and which process dies with which message in hand.

An order is a charge, so clients, storm and judgement of the answers are those of the charges. It leads to two messages,
whose effects come about elsewhere: a receipt in the database, and a fee at the payment provider.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from .plan import Charge, Plan, Trouble, charges_with

#: Both messages of an order, by the last part of their topics' names.
RECEIPT, FEE = "send_receipt", "pay_fee"
MESSAGES = (RECEIPT, FEE)

#: One in so many orders is declined, after its messages were published.
DECLINED_EVERY = 6


@dataclass(frozen=True)
class Side:
    """An endpoint, and how its messages reach the workers."""

    name: str
    title: str
    path: str


OUTBOX = Side("outbox", "outbox, inbox", "/orders/")
DIRECT = Side("direct", "apply_async", "/unprotected/orders/")
SIDES = (OUTBOX, DIRECT)


class Kill(str, Enum):
    """What was killed behind the server."""

    RELAY = "relay"
    CHILD = "worker child"
    WORKER = "worker"
    BROKER = "broker"


class Strike(str, Enum):
    """Who is killed while a worker has the message in hand, and where the worker stands then."""

    CHILD_AT_START = "child_at_start"  # its process, when nothing is written
    CHILD_AT_WORK = "child_at_work"  # its process, when the effect is written and not committed
    CHILD_AT_ACK = "child_at_ack"  # its process, when all is committed and nothing acknowledged
    WORKER = "worker"  # the main process of the worker and all of its children, at the same place
    BROKER = "broker"  # the broker, at the same place


#: What the messages of one set of orders meet, besides the relay's death. Worker and broker serve both sides, and are
#: killed on behalf of one. The control's receipts are acknowledged late and its fees early, as Celery does by default;
#: so the one is done again, and the other lost.
STRIKES: dict[Side, tuple[tuple[Strike, str], ...]] = {
    OUTBOX: (
        (Strike.CHILD_AT_WORK, RECEIPT),
        (Strike.WORKER, FEE),
        (Strike.BROKER, RECEIPT),
        (Strike.CHILD_AT_ACK, FEE),
    ),
    DIRECT: ((Strike.CHILD_AT_ACK, RECEIPT), (Strike.CHILD_AT_START, FEE), (Strike.CHILD_AT_START, FEE)),
}
ORDERS_IN_A_SET = 36

#: What happens to the requests, over and over. Killings are few because each takes a worker's other requests with it.
TROUBLES = (
    *(Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY),
    *(Trouble.CALM, Trouble.TIMEOUT, Trouble.CUT, Trouble.CALM, Trouble.BURST) * 4,
    *(Trouble.CALM, Trouble.CALM),
)


@dataclass(frozen=True)
class Order(Charge):
    """One logical order."""

    declined: bool = False
    strike: Strike | None = None
    struck: str = ""  # which of its two messages is meant

    def payload(self, *, changed: bool = False) -> bytes:
        amount = self.amount + 1 if changed else self.amount
        source = "declined" if self.declined else "card"
        return json.dumps({"amount": amount, "label": self.label, "source": source}).encode()


def draw_orders(plan: Plan, side: Side, run: str) -> list[Order]:
    """The orders of a side: the same for each, but for their keys and labels, and for who dies with their messages."""
    chance = random.Random(f"{plan.seed}:orders")
    troubles = (list(TROUBLES) * (plan.orders // len(TROUBLES) + 1))[: plan.orders]
    chance.shuffle(troubles)
    # Nothing is sent with another payload: the control would take it for an order of its own, and rightly so.
    orders = [
        Order(**vars(replace(charge, changed_payload=False)), declined=number % DECLINED_EVERY == DECLINED_EVERY - 1)
        for number, charge in enumerate(charges_with(troubles, chance, run_of(side, run)))
    ]
    strikes = list(STRIKES[side]) * max(1, plan.orders // ORDERS_IN_A_SET)
    accepted = [number for number, order in enumerate(orders) if not order.declined]
    # A message of the control that is there twice anyhow would hide that one of them was lost.
    once = [number for number in accepted if is_sent_once(orders[number])]
    candidates = once if side is DIRECT and len(once) >= len(strikes) else accepted
    # Spread over the run, so that there are messages before and after each.
    for place, (strike, struck) in enumerate(strikes):
        number = candidates[(2 * place + 1) * len(candidates) // (2 * len(strikes))]
        orders[number] = replace(orders[number], strike=strike, struck=struck)
    return orders


def is_sent_once(order: Order) -> bool:
    """Whether one request does, unless somebody dies."""
    return order.trouble is Trouble.CALM and not order.late_duplicate


def strikes_of(orders: Iterable[Order]) -> dict[tuple[str, str], Strike]:
    """By the label of the order and the message of the two."""
    return {(order.label, order.struck): order.strike for order in orders if order.strike is not None}


def run_of(side: Side, run: str) -> str:
    """The beginning of a side's keys and labels, which no other's begins with."""
    return f"{run}.{side.name}"
