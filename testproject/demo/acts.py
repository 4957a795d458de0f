"""The three acts of the demo: where the requests go, what trouble they meet, and what must come of it.

A row of an act's table is declared once, with what its figure must be. The report shows it, and the verdict fails where
it is something else. A trouble that never came fails the run, too: it would have shown nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from testproject.harness.strikes import Strike

from .plan import Charge, Plan, Trouble, charges_with

Kind = tuple[Trouble, Mapping[str, str]]


@dataclass(frozen=True)
class Side:
    """An endpoint, beside others that meet the same storm."""

    name: str
    title: str
    path: str
    control: bool = False  # it is not protected
    may_park: bool = False  # an unknown outcome is an outcome


@dataclass(frozen=True)
class Must:
    """What a figure must be, by the other figures of its side."""

    words: str
    holds: Callable[[int, Counter[str]], bool]


NONE = Must("0", lambda value, counts: value == 0)
SOME = Must("more than 0, or the run shows nothing", lambda value, counts: value > 0)
DAMAGE = Must("more than 0, or other damage was done", lambda value, counts: value > 0 or counts["lost"] > 0)
ONE_EACH = Must("one for each that was expected", lambda value, counts: value == counts["expected"])
ONE_ROW = Must(
    "one for each that is not parked, which may have got as far as its row",
    lambda value, counts: counts["operations"] - counts["parked"] <= value <= counts["operations"],
)
#: In SQLite there is one writer at a time, so nobody can take over while a stalled one's transaction is open.
OUTLIVED = Must(SOME.words, lambda value, counts: value > 0 or counts["one_writer"] > 0)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    #: The name of the figure, see ``books`` and ``Tally``.
    figure: str
    #: What it must be where it is protected, and at the control.
    must: Must | None = None
    control: Must | None = None
    #: What it must be where an operation may be parked, if that is something else.
    parking: Must | None = None
    #: The one side that it is about, if it isn't about all.
    only: str = ""
    #: Whether a line is drawn below it.
    ends: bool = False

    def must_be(self, side: Side) -> Must | None:
        if self.only not in {"", side.name}:
            return None
        return self.control if side.control else (self.parking if side.may_park else None) or self.must


@dataclass(frozen=True)
class Act:
    noun: str
    title: str
    #: What is said before it is played. The plan's options are filled in.
    story: str
    #: What has effects, and where these are counted.
    counted: str
    where: str
    sides: tuple[Side, ...]
    kinds: Callable[[Plan, random.Random], list[Kind]]
    rows: tuple[Row, ...]
    #: The field of an answer that names the effect.
    named_by: str = "id"
    may_change: bool = True

    def draw(self, plan: Plan, side: Side, run: str) -> list[Charge]:
        """The same for each side, but for keys and labels."""
        chance = random.Random(f"{plan.seed}:{self.noun}")
        return charges_with(self.kinds(plan, chance), chance, run_of(side, run), may_change=self.may_change)


def run_of(side: Side, run: str) -> str:
    """The beginning of a side's keys and labels, which no other's begins with."""
    return f"{run}.{side.name}"


def shuffled(kinds: Sequence[Kind], count: int, chance: random.Random) -> list[Kind]:
    """So many of them, one after the other and from the beginning again, in another order."""
    drawn = list(islice(cycle(kinds), count))
    chance.shuffle(drawn)
    return drawn


# The first act: charges, whose effects are rows.

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


def charge_kinds(plan: Plan, chance: random.Random) -> list[Kind]:
    """Two of each come first, and the rest is drawn. The order is then mixed."""
    troubles = list(Trouble) * 2 + chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=plan.operations)
    return shuffled([(trouble, {"currency": "usd"}) for trouble in troubles], plan.operations, chance)


CHARGES = Act(
    noun="charges",
    title="bad network",
    story="[bold]Sending {0.operations:,} charges over a bad network to a server that is being killed.[/]\n"
    "Clients stop waiting, cut their connection or send duplicates at the same instant, and retry under one "
    "Idempotency-Key until they know the outcome, while worker processes die by SIGKILL. The same storm meets an "
    "endpoint without protection beside it. Effects are counted in the database.",
    counted="charges",
    where="in the database",
    sides=(
        Side("protected", "protected", "/charges/"),
        Side("unprotected", "unprotected", "/unprotected/charges/", control=True),
    ),
    kinds=charge_kinds,
    rows=(
        Row("logical charges", "operations"),
        Row("effects counted in the database", "effects", ONE_EACH),
        Row("charged more than once", "doubled", NONE, control=SOME),
        Row("acknowledged but lost", "lost", NONE),
        Row("wrong answers", "wrong", NONE),
        Row("outcome never learned", "unsettled", NONE, ends=True),
        Row("HTTP requests sent", "attempt"),
        Row("cut by the client", "cut", SOME),
        Row("timed out", "timeout", SOME),
        Row("broken off by the server's death", "broken", ends=True),
        Row("replays of the recorded outcome", "replay", SOME),
        Row("conflicts, 409: another attempt at work", "conflict", SOME),
        Row("changed payloads rejected, 422", "key_reused", SOME),
        Row("told to come back, 503", "unavailable"),
        Row("other server errors, 5xx", "error", ends=True),
        Row("charges whose worker was killed on purpose", "killed_at_work", SOME),
        Row("stalled workers that woke after a take-over", "outlived", OUTLIVED),
        Row("claims taken over from dead or stalled workers", "take_overs", SOME),
        Row("workers killed with SIGKILL, of both sides", "kills", SOME),
    ),
)


# The second act: payouts, whose effects are at a provider. On top of the network's and the server's trouble comes the
# provider's: it fails, or falls silent, after it has paid or before.

PAYOUT_KINDS: tuple[Kind, ...] = tuple(
    (trouble, {"fault": fault})
    for trouble, fault in (
        *((trouble, "") for trouble in (Trouble.CALM, Trouble.TIMEOUT, Trouble.CUT, Trouble.BURST)),
        *((trouble, "") for trouble in (Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY)),
        *((trouble, "succeed_then_hang") for trouble in (Trouble.CALM, Trouble.BURST)),
        *((Trouble.CALM, fault) for fault in ("error_after_success", "late", "hang", "error_before")),
    )
)

PAYOUTS = Act(
    noun="payouts",
    title="a provider that fails after it has paid",
    story="Then {0.payouts:,} payouts under each declaration of what a crash means, at a payment provider that fails "
    "or falls silent after it has paid. Effects are counted in the provider's own ledger.",
    counted="payouts",
    where="in the provider's ledger",
    sides=(
        Side("reexecute", "REEXECUTE", "/payouts/reexecute/"),
        Side("reconcile", "Reconcile", "/payouts/"),
        Side("park", "PARK", "/payouts/park/", may_park=True),
        Side("control", "unprotected", "/unprotected/payouts/", control=True),
    ),
    kinds=lambda plan, chance: shuffled(PAYOUT_KINDS, plan.payouts, chance),
    named_by="provider_id",
    rows=(
        Row("logical payouts", "operations"),
        Row("in the provider's ledger", "effects", ONE_EACH, parking=Must("any", lambda value, counts: True)),
        Row("paid more than once", "doubled", NONE, control=SOME),
        Row("acknowledged but never paid", "lost", NONE),
        Row("wrong answers", "wrong", NONE),
        Row("outcome never learned", "unsettled", NONE),
        Row("parked until somebody decides", "parked", NONE, parking=SOME),
        Row("rows of our own", "rows", ONE_ROW, ends=True),
        Row("HTTP requests sent", "attempt"),
        Row("502: the provider failed", "provider_failed", SOME),
        Row("workers killed in mid-payout", "killed_at_work", SOME),
        Row("found paid by a reconciler", "reconciled", SOME, only="reconcile"),
        Row("run again, same derived key", "take_overs", SOME, only="reexecute"),
        Row("deduplicated by the provider", "deduplicated", SOME, only="reexecute"),
    ),
)


# The third act: orders. An order is a charge, and leads to two messages, whose effects come about elsewhere: a receipt
# in the database, and a fee at the payment provider.

RECEIPT, FEE = "send_receipt", "pay_fee"
MESSAGES = (RECEIPT, FEE)
OUTBOX = Side("outbox", "outbox, inbox", "/orders/")
DIRECT = Side("direct", "apply_async", "/unprotected/orders/", control=True)

#: One in so many orders is declined, after its messages were published.
DECLINED_EVERY = 6
#: What happens to the requests, over and over. Killings are few because each takes a worker's other requests with it.
ORDER_TROUBLES = (
    *(Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY),
    *(Trouble.CALM, Trouble.TIMEOUT, Trouble.CUT, Trouble.CALM, Trouble.BURST) * 4,
    *(Trouble.CALM, Trouble.CALM),
)


def order_kinds(plan: Plan, chance: random.Random) -> list[Kind]:
    drawn = shuffled([(trouble, {}) for trouble in ORDER_TROUBLES], plan.orders, chance)
    declined = (number % DECLINED_EVERY == DECLINED_EVERY - 1 for number in range(plan.orders))
    return [(kind[0], {"source": "declined" if no else "card"}) for kind, no in zip(drawn, declined, strict=True)]


ORDERS = Act(
    noun="orders",
    title="dying relays, workers and brokers",
    story="At last {0.orders:,} orders, each with two messages that go through the outbox, a relay, a real Redis and a "
    "Celery worker, all of them killed on the way; beside it plain tasks, sent by the handler. Effects are counted in "
    "the database and in the provider's ledger.",
    counted="messages",
    where="of their messages",
    sides=(OUTBOX, DIRECT),
    kinds=order_kinds,
    may_change=False,  # the control would take it for an order of its own, and rightly so
    rows=(
        Row("logical orders, of two messages each", "accepted"),
        Row("declined orders, rolled back", "declined"),
        Row("different messages sent", "messages"),
        Row("deliveries to a worker", "deliveries", ends=True),
        Row("effects, in database and provider's ledger", "effects", ONE_EACH),
        Row("messages with more than one effect", "doubled", NONE, control=DAMAGE),
        Row("messages lost", "lost", NONE),
        Row("effects of declined orders", "ghosts", NONE, control=SOME),
        Row("wrong answers, or charges", "wrong", NONE),
        Row("outcome never learned", "unsettled", NONE),
        Row("duplicates answered from the record", "replays", SOME, only="outbox"),
        Row("lost by the broker, and sent again", "resent", only="outbox", ends=True),
        Row("HTTP requests sent", "attempt"),
        Row("SIGKILL: server's workers in mid-order", "killed_at_work", SOME, ends=True),
        Row("SIGKILL: relays, between confirm and mark", "relays", SOME),
        Row("SIGKILL: worker children, of both sides", "children", SOME),
        Row("SIGKILL: whole workers, of both sides", "workers", SOME),
        Row("SIGKILL: brokers, of both sides", "brokers", SOME),
        Row("ended with their broker, and started again", "ended"),
    ),
)
ACTS = (CHARGES, PAYOUTS, ORDERS)

#: A relay dies with its first message, this often: the broker has confirmed it, and nothing is marked.
RELAY_STRIKES = (Strike("relay.published", "child", times=2),)

#: What the messages of one set of orders meet: where their worker stands, who dies, and with which message. ``hold`` is
#: the broker's death. Worker and broker serve both sides, and are killed on behalf of one. The control's receipts are
#: acknowledged late and its fees early, as Celery does by default; so the one is done again, and the other lost.
STRIKES = {
    OUTBOX: (
        ("at_work", "child", RECEIPT),  # the effect is written and not committed
        ("ended", "group", FEE),  # all is committed and nothing acknowledged
        ("ended", "hold", RECEIPT),
        ("ended", "child", FEE),
    ),
    DIRECT: (("ended", "child", RECEIPT), ("started", "child", FEE), ("started", "child", FEE)),
}
ORDERS_IN_A_SET = 36


def strikes_of(side: Side, orders: Sequence[Charge]) -> list[Strike]:
    """Who dies with which message, spread over the run, so that there are messages before and after each."""
    planned = list(STRIKES[side]) * max(1, len(orders) // ORDERS_IN_A_SET)
    accepted = [order for order in orders if not order.declined]
    # A message of the control that is there twice anyhow would hide that one of them was lost.
    once = [order for order in accepted if order.trouble is Trouble.CALM and not order.late_duplicate]
    candidates = once if side.control and len(once) >= len(planned) else accepted
    return [
        Strike(place, act, label=f"{task}.{candidates[(2 * at + 1) * len(candidates) // (2 * len(planned))].label}")
        for at, (place, act, task) in enumerate(planned)
    ]
