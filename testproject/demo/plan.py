"""What the storm will do, decided before it starts: the options, and the charges with the trouble each will meet.

Everything random here and in the clients comes from the seed, but for the waits between a client's attempts, so that
the protected and the unprotected endpoint meet the same storm. What the scheduler, the network stack and the killed
workers make of it differs from run to run.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

ACCOUNTS = ("alice", "bob")
MOST = 100_000
MAX_BURST = 6

CHANCE_OF_LATE_DUPLICATE = 0.3
CHANCE_OF_CHANGED_PAYLOAD = 0.1
CHANCE_OF_SHARED_KEY = 0.1


class Trouble(str, Enum):
    """What happens to the first request of a charge. Whatever it is, the client then retries until it knows."""

    CALM = "calm"  # the answer arrives
    TIMEOUT = "timeout"  # the client stops waiting while the server still works
    CUT = "cut"  # the client's connection is reset after the request was sent
    BURST = "burst"  # several requests at the same instant, some of them cut or timed out
    STALL = "stall"  # two requests, and the worker that got the claim stands still until another has taken it over
    KILL_AT_WORK = "kill_at_work"  # the worker is killed after it wrote the charge, before it answered
    KILL_AT_REPLY = "kill_at_reply"  # the worker is killed when all is done but the answer is not sent


def within(low: float, high: float, kind: type) -> Callable[[str], Any]:
    """An argparse type: a number from ``low`` to ``high``, both included."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value" by it
    return parse


def option(default: float, low: float, high: float, words: str) -> Any:
    help_text = f"{words}; at least {low} (default: %(default)s)"
    return field(default=default, metadata={"type": within(low, high, type(default)), "help": help_text})


@dataclass(frozen=True)
class Plan:
    """The options of one run. Durations are seconds.

    Each kind of trouble comes up at least twice in the fewest operations that are allowed, so that no check can pass
    for want of a case.
    """

    operations: int = option(500, 20, MOST, "logical charges for each of the two endpoints")
    payouts: int = option(24, 24, MOST, "logical payouts for each of the three declarations and the control")
    orders: int = option(30, 24, MOST, "logical orders for the outbox and for the control, of two messages each")
    workers: int = option(4, 1, 64, "gunicorn worker processes")
    concurrency: int = option(48, 1, 256, "charges under way at the same time, most of them waiting")
    kill_every: float = option(2.0, 0.1, 3600, "seconds between two random kills, besides those in mid-charge")
    lease: int = option(2, 1, 60, "seconds until a killed worker's claim may be taken over")
    time_limit: float = option(300.0, 1, 86400, "seconds after which an act that is not over has failed")
    seed: int = option(1, -(2**31), 2**31, "draws another storm")
    patience: float = 120.0  # of a client: on a loaded machine it may meet many killed workers in a row


OPTIONS = {f"--{one.name.replace('_', '-')}": one for one in fields(Plan) if one.metadata}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run, for the command and for the process it starts."""
    for name, one in OPTIONS.items():
        parser.add_argument(name, default=one.default, **one.metadata)


def plan_from(options: Mapping[str, Any]) -> Plan:
    """The plan that parsed options describe; others among them are left alone."""
    return Plan(**{one.name: options[one.name] for one in OPTIONS.values()})


def arguments_of(plan: Plan) -> Sequence[str]:
    """The command line that ``add_arguments`` turns into this plan again."""
    return [word for name, one in OPTIONS.items() for word in (name, str(getattr(plan, one.name)))]


@dataclass(frozen=True)
class Charge:
    """One logical charge, payout or order, to be sent once, however many requests that takes."""

    number: int
    account: str
    key: str
    label: str  # names this charge where its effects are counted; no endpoint looks at it
    amount: int  # cents
    trouble: Trouble
    burst: int  # requests sent at the same instant
    late_duplicate: bool  # sent once more when the outcome is known
    changed_payload: bool  # then the same key is used with another amount, which must be refused
    more: Mapping[str, str] = field(default_factory=dict)  # what the request says besides

    @property
    def declined(self) -> bool:
        """Whether it must be refused and leave nothing behind."""
        return self.more.get("source") == "declined"

    @property
    def name(self) -> str:
        """Names its effect, which must be the account's own."""
        return f"{self.account}/{self.label}"

    def payload(self, *, changed: bool = False) -> bytes:
        """The request's body; ``changed`` asks for another amount."""
        amount = self.amount + 1 if changed else self.amount
        return json.dumps({"amount": amount, "label": self.label, **self.more}).encode()


def account_in(label: str) -> str:
    """The account of the charge that bears the label."""
    return label.split("-")[-2]


def charges_with(
    kinds: Sequence[tuple[Trouble, Mapping[str, str]]], chance: random.Random, run: str, *, may_change: bool = True
) -> list[Charge]:
    """A charge for each kind of trouble and what its request says besides; everything else about it is drawn.

    :param run: makes keys and labels its own, so that a database can be used again.
    :param may_change: whether some keys are used with another payload.
    """
    charges: list[Charge] = []
    for number, (trouble, more) in enumerate(kinds):
        account, key = chance.choice(ACCOUNTS), f"{run}-{number}"
        if charges and (number == 1 or chance.random() < CHANCE_OF_SHARED_KEY):
            account, key = ACCOUNTS[1 - ACCOUNTS.index(charges[-1].account)], charges[-1].key
            if any((charge.account, charge.key) == (account, key) for charge in charges[-2:]):
                key = f"{run}-{number}"  # both accounts have used that key already
        charges.append(
            Charge(
                number=number,
                account=account,
                key=key,
                label=f"{run}-{account}-{number}",
                amount=chance.randint(100, 100_000),
                trouble=trouble,
                burst={Trouble.BURST: chance.randint(2, MAX_BURST), Trouble.STALL: 2}.get(trouble, 1),
                late_duplicate=number % 10 == 0 or chance.random() < CHANCE_OF_LATE_DUPLICATE,
                changed_payload=(number % 15 == 0 or chance.random() < CHANCE_OF_CHANGED_PAYLOAD) and may_change,
                more=more,
            )
        )
    return charges
