"""What a storm will do, decided before it starts: the options, and the charges with the trouble that each will meet.

Everything random comes from the seed, except for the waits between a client's attempts. So both endpoints meet the same
storm. What the scheduler, the network and the killed workers make of it differs from run to run.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import cycle, islice
from typing import Any

ACCOUNTS = ("alice", "bob")
MAX_BURST = 6
CHANCE_OF_LATE_DUPLICATE = 0.3
CHANCE_OF_CHANGED_PAYLOAD = 0.1
#: One in so many orders is declined, after its message was published.
DECLINED_EVERY = 6


class Trouble(StrEnum):
    """What happens to the first request of a charge. The client then retries until it knows the outcome."""

    CALM = "calm"  # the answer arrives
    CUT = "cut"  # the client stops waiting and closes the connection while the server still works
    BURST = "burst"  # several requests at the same instant, some of them cut
    KILL_AT_WORK = "kill_at_work"  # the worker is killed after it wrote the charge, before it answered
    KILL_AT_REPLY = "kill_at_reply"  # the worker is killed when everything is committed but the answer is not sent


#: What happens to the requests, over and over. Killings are few because each takes a worker's other requests with it.
TROUBLES = (
    *(Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY),
    *(Trouble.CALM, Trouble.CUT, Trouble.CALM, Trouble.BURST) * 8,
)


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type."""

    def parse(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"{text} is not at least {low}")
        return int(text)

    return parse


@dataclass(frozen=True)
class Plan:
    """The options of one run. Durations are in seconds.

    Each kind of trouble comes up in the fewest operations that are allowed, so that no check can pass for want of a
    case.
    """

    operations: int = 500
    orders: int = 40
    seed: int = 1
    time_limit: int = 300
    workers: int = 4
    concurrency: int = 48
    kill_every: float = 2.0  # on average, during the charges
    lease: int = 2  # until a killed worker's claim may be taken over
    patience: float = 120.0  # of a client: on a loaded machine it may meet many killed workers in a row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, low, words in (
        ("operations", 20, "logical charges for each of the two endpoints"),
        ("orders", 24, "logical orders for each of the two endpoints, with a message each"),
        ("seed", 0, "draws another storm"),
        ("time-limit", 1, "seconds after which a storm that is not over has failed"),
    ):
        default = getattr(Plan, name.replace("-", "_"))
        help_text = f"{words}; at least {low} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=at_least(low), default=default, help=help_text)


def plan_from(options: Mapping[str, Any]) -> Plan:
    """The plan that parsed options describe. Other options are ignored."""
    return Plan(**{one.name: options[one.name] for one in fields(Plan) if one.name in options})


@dataclass(frozen=True)
class Charge:
    """One logical charge or order, to be sent once, however many requests that takes."""

    number: int
    account: str
    key: str
    label: str  # names this charge where its effects are counted; no endpoint looks at it
    amount: int  # cents
    trouble: Trouble
    burst: int  # requests sent at the same instant
    late_duplicate: bool  # sent once more when the outcome is known
    changed_payload: bool  # then the same key is used with another amount, which must be refused
    source: str = "card"

    @property
    def declined(self) -> bool:
        """Whether it must be refused and leave nothing behind."""
        return self.source == "declined"

    def payload(self, *, changed: bool = False) -> bytes:
        """The request's body; ``changed`` asks for another amount."""
        amount = self.amount + 1 if changed else self.amount
        return json.dumps({"amount": amount, "currency": "usd", "label": self.label, "source": self.source}).encode()


def draw(plan: Plan, run: str, *, orders: bool = False) -> list[Charge]:
    """The charges of one endpoint, or its orders. They are the same for each ``run``, except for keys and labels."""
    count = plan.orders if orders else plan.operations
    chance = random.Random(f"{plan.seed}:{orders}")
    troubles = list(islice(cycle(TROUBLES), count))
    chance.shuffle(troubles)
    return [
        Charge(
            number=number,
            account=chance.choice(ACCOUNTS),
            key=f"{run}-{number}",
            label=f"{run}-{number}",
            amount=chance.randint(100, 100_000),
            trouble=trouble,
            burst=chance.randint(2, MAX_BURST) if trouble is Trouble.BURST else 1,
            late_duplicate=number % 10 == 0 or chance.random() < CHANCE_OF_LATE_DUPLICATE,
            # The unprotected endpoint of orders would rightly take a changed payload for another order.
            changed_payload=(number % 15 == 0 or chance.random() < CHANCE_OF_CHANGED_PAYLOAD) and not orders,
            source="declined" if orders and number % DECLINED_EVERY == DECLINED_EVERY - 1 else "card",
        )
        for number, trouble in enumerate(troubles)
    ]
