"""What the storm will do, decided before it starts: the options, and the charges with the trouble each will meet.

Everything random here and in the clients comes from the seed, but for the waits between a client's attempts, so that
the protected and the unprotected endpoint meet the same storm. What the scheduler, the network stack and the killed
workers make of it differs from run to run.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

Number = TypeVar("Number", int, float)

ACCOUNTS = ("alice", "bob")

#: Each kind of trouble comes up at least twice in this many charges, so that no check can pass for want of a case.
MIN_OPERATIONS = 20
MIN_PAYOUTS = 24
MIN_ORDERS = 24
MAX_OPERATIONS = 100_000
MAX_BURST = 6


class Trouble(str, Enum):
    """What happens to the first request of a charge. Whatever it is, the client then retries until it knows."""

    CALM = "calm"  # the answer arrives
    TIMEOUT = "timeout"  # the client stops waiting while the server still works
    CUT = "cut"  # the client's connection is reset after the request was sent
    BURST = "burst"  # several requests at the same instant, some of them cut or timed out
    STALL = "stall"  # two requests, and the worker that got the claim stands still until another has taken it over
    KILL_AT_WORK = "kill_at_work"  # the worker is killed after it wrote the charge, before it answered
    KILL_AT_REPLY = "kill_at_reply"  # the worker is killed when all is done but the answer is not sent


#: Out of a hundred. Killings are few because each takes a worker's other requests with it.
WEIGHTS = {
    Trouble.CALM: 18,
    Trouble.TIMEOUT: 22,
    Trouble.CUT: 24,
    Trouble.BURST: 31,
    Trouble.STALL: 2,
    Trouble.KILL_AT_WORK: 2,
    Trouble.KILL_AT_REPLY: 1,
}
CHANCE_OF_LATE_DUPLICATE = 0.3
CHANCE_OF_CHANGED_PAYLOAD = 0.1
CHANCE_OF_SHARED_KEY = 0.1


@dataclass(frozen=True)
class Plan:
    """The options of one run. Durations are seconds."""

    operations: int = 500
    payouts: int = 24
    orders: int = 30
    workers: int = 4
    concurrency: int = 48
    kill_every: float = 2.0
    lease: int = 2
    patience: float = 60.0
    time_limit: float = 300.0
    seed: int = 1


@dataclass(frozen=True)
class Charge:
    """One logical charge, to be sent once to each endpoint, however many requests that takes."""

    number: int
    account: str
    key: str
    label: str  # names this charge in the database, where its effects are counted; no endpoint looks at it
    amount: int  # cents
    trouble: Trouble
    burst: int  # requests sent at the same instant
    late_duplicate: bool  # sent once more when the outcome is known
    changed_payload: bool  # then the same key is used with another amount, which must be refused

    def payload(self, *, changed: bool = False) -> bytes:
        """The request's body; ``changed`` asks for another amount."""
        amount = self.amount + 1 if changed else self.amount
        return json.dumps({"amount": amount, "currency": "usd", "label": self.label}).encode()


def draw_charges(plan: Plan, run: str) -> list[Charge]:
    """The charges of a run. ``run`` makes its keys and labels its own, so that a database can be used again."""
    chance = random.Random(plan.seed)
    # One of each kind comes first; the rest is drawn. The order is then mixed.
    troubles = list(Trouble) * 2
    troubles += chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=max(0, plan.operations - len(troubles)))
    troubles = troubles[: plan.operations]
    chance.shuffle(troubles)
    return charges_with(troubles, chance, run)


def charges_with(troubles: Sequence[Trouble], chance: random.Random, run: str) -> list[Charge]:
    """A charge for each trouble, everything else about it drawn."""
    charges: list[Charge] = []
    for number, trouble in enumerate(troubles):
        previous = charges[-1] if charges else None
        account = chance.choice(ACCOUNTS)
        key = f"{run}-{number}"
        if previous is not None and (number == 1 or chance.random() < CHANCE_OF_SHARED_KEY):
            account, key = other_account(previous.account), previous.key
            if any(charge.account == account and charge.key == key for charge in charges[-2:]):
                key = f"{run}-{number}"  # both accounts have used that key already
        charges.append(
            Charge(
                number=number,
                account=account,
                key=key,
                label=f"{run}-{number}",
                amount=chance.randint(100, 100_000),
                trouble=trouble,
                burst={Trouble.BURST: chance.randint(2, MAX_BURST), Trouble.STALL: 2}.get(trouble, 1),
                late_duplicate=number % 10 == 0 or chance.random() < CHANCE_OF_LATE_DUPLICATE,
                changed_payload=number % 15 == 0 or chance.random() < CHANCE_OF_CHANGED_PAYLOAD,
            )
        )
    return charges


def other_account(account: str) -> str:
    return ACCOUNTS[1 - ACCOUNTS.index(account)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run, for the command and for the process it starts."""
    default = Plan()
    parser.add_argument(
        "--operations",
        type=within(int, MIN_OPERATIONS, MAX_OPERATIONS),
        default=default.operations,
        help=f"logical charges to send to each of the two endpoints, at least {MIN_OPERATIONS} (default: %(default)s)",
    )
    parser.add_argument(
        "--payouts",
        type=within(int, MIN_PAYOUTS, MAX_OPERATIONS),
        default=default.payouts,
        help="logical payouts to send afterwards to each of the three declarations and to the control, at least "
        f"{MIN_PAYOUTS} (default: %(default)s)",
    )
    parser.add_argument(
        "--orders",
        type=within(int, MIN_ORDERS, MAX_OPERATIONS),
        default=default.orders,
        help="logical orders to send at last, through the outbox and to the control, each of which leads to two "
        f"messages; at least {MIN_ORDERS} (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=within(int, 1, 64),
        default=default.workers,
        help="gunicorn worker processes (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=within(int, 1, 256),
        default=default.concurrency,
        help="charges under way at the same time, most of them waiting (default: %(default)s)",
    )
    parser.add_argument(
        "--kill-every",
        type=within(float, 0.1, 3600),
        default=default.kill_every,
        metavar="SECONDS",
        help="a random worker is killed about this often, besides those killed in mid-charge (default: %(default)s)",
    )
    parser.add_argument(
        "--lease",
        type=within(int, 1, 60),
        default=default.lease,
        metavar="SECONDS",
        help="how long a killed worker's claim is respected before a retry takes it over (default: %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=within(float, 1, 86400),
        default=default.time_limit,
        metavar="SECONDS",
        help="give up, as a failure, if the storm is not over by then (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="draws another storm (default: %(default)s)")


def plan_from(options: dict[str, object]) -> Plan:
    """The plan that parsed options describe; others among them are left alone."""
    return Plan(**{name: options[name] for name in Plan.__dataclass_fields__ if name in options})  # type: ignore[arg-type]


def arguments_of(plan: Plan) -> Sequence[str]:
    """The command line that ``add_arguments`` turns into this plan again."""
    names = ("operations", "payouts", "orders", "workers", "concurrency", "kill_every", "lease", "time_limit", "seed")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(plan, name)))]


def within(kind: Callable[[str], Number], low: Number, high: Number) -> Callable[[str], Number]:
    """An argparse type: a number from ``low`` to ``high``, both included."""

    def parse(text: str) -> Number:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value" by it
    return parse
