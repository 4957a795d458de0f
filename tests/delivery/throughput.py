"""How fast messages get through: outbox, relay, broker and inbox beside ``apply_async`` and an ordinary task.

Both write a row and publish in one transaction (the ordinary one right after it), and both tasks write a row. The same
broker, database, machine and number of processes, in turns. Nothing is asserted: a rate says something only beside the
other one of the same run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

from tests.delivery.stage import Stage
from tests.harness.world import markdown

ROUNDS = 3
#: Messages that nobody measures: workers connect, and pools fork.
WARM_UP = 50
TABLES = {True: "testproject_receipt", False: "testproject_unprotectedreceipt"}


@dataclass
class Rates:
    """Messages a second, of each round."""

    published: list[float] = field(default_factory=list)
    #: From the first transaction to the last effect.
    through: list[float] = field(default_factory=list)


def measure(stage: Stage, messages: int, rounds: int = ROUNDS) -> dict[bool, Rates]:
    """The rates with the outbox and the inbox (True), and without (False)."""
    rates = {True: Rates(), False: Rates()}
    for _ in range(rounds):
        for outbox in (False, True):
            _measure_once(stage, messages, outbox, rates[outbox])
    return rates


def _measure_once(stage: Stage, messages: int, outbox: bool, rates: Rates) -> None:
    with stage.scene("throughput", messages) as scene:
        scene.start_workers(count=1)
        relay = scene.start_relay() if outbox else None

        def send(name: str, count: int) -> float:
            producer = scene.start("fast producer", name=f"{scene.name}-{name}", count=count, outbox=outbox)
            seconds: float = producer.expect("done")["seconds"]
            statement = f"SELECT count(*) FROM {TABLES[outbox]} WHERE label LIKE %s"
            pattern = f"{scene.name}-{name}-%"
            scene.until(lambda: stage.count(statement, pattern) >= count, "all messages have got through")
            return seconds

        send("warm", WARM_UP)
        started = time.monotonic()
        publishing = send("measured", messages)
        rates.through.append(messages / (time.monotonic() - started))
        rates.published.append(messages / publishing)
        scene.settle()
        if relay is not None:
            scene.finish(relay)


def table(measured: dict[str, dict[bool, Rates]]) -> str:
    """By broker, in Markdown: the median of the rounds, and in brackets the slowest and the fastest."""
    rows = []
    for broker, rates in measured.items():
        for name, of in (("published", "published"), ("from transaction to effect", "through")):
            ordinary, protected = getattr(rates[False], of), getattr(rates[True], of)
            ratio = median(protected) / median(ordinary)
            rows.append([f"{broker}, {name}", _range(ordinary), _range(protected), f"{ratio:.2f}"])
    return markdown(["messages a second", "ordinary", "outbox and inbox", "ratio"], rows)


def _range(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f}–{max(values):.0f})"
