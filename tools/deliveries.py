"""``python -m tools.deliveries``: run every delivery fault on every broker, and print tables in Markdown.

It starts the brokers and a temporary PostgreSQL, unless ``DATABASE_URL`` names a server whose account may create
databases. Failures are printed immediately, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence

from testproject.harness.redis import RedisMissingError
from tests.delivery.faults import FAULTS, run
from tests.delivery.stage import BROKERS, stage
from tests.delivery.tally import Count, Verdict
from tests.harness.servers import ProgramMissingError
from tests.harness.zygote import ImpossibleError
from tests.results import note
from tools.reports import markdown, say


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.deliveries", description=__doc__)
    parser.add_argument("--messages", type=int, default=40, help="messages of each kind for each fault and broker")
    parser.add_argument("--broker", choices=BROKERS, action="append", help="run only this one; may be repeated")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="run only this one; may be repeated")
    options = parser.parse_args(arguments)
    verdicts: list[Verdict] = []
    failed = False
    started = time.monotonic()
    for broker in options.broker or BROKERS:
        try:
            with stage(broker, os.environ.get("DATABASE_URL")) as shared:
                for name in options.fault or FAULTS:
                    try:
                        verdict = run(shared, name, options.messages)
                    except (ImpossibleError, TimeoutError) as error:
                        verdict = Verdict(name, broker, problems=[repr(error)])
                        say(error)
                    say(verdict)
                    note_verdict(verdict, shared.database.server())
                    verdicts.append(verdict)
                    failed |= not verdict.passed
        except (RedisMissingError, ProgramMissingError) as error:
            say(error)
            return 2
    for broker in BROKERS:
        if of_broker := [verdict for verdict in verdicts if verdict.broker == broker]:
            say(f"\n## {broker}\n\n{table(of_broker)}\n")
    passed = sum(verdict.passed for verdict in verdicts)
    say(f"{len(verdicts)} scripts, {passed} passed; {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def note_verdict(verdict: Verdict, server: str) -> None:
    kept, plain = verdict.kept, verdict.plain
    note(
        "deliveries",
        server=server,
        broker=verdict.broker,
        fault=verdict.fault,
        messages=kept.expected,
        deliveries=kept.deliveries,
        fired=verdict.struck,
        violations=kept.doubled + kept.lost + kept.ghosts,
        sent_again=verdict.lost_by_broker,
        control=[plain.doubled, plain.lost, plain.ghosts],
        **({} if verdict.passed else {"failed": "; ".join(verdict.problems)[:300]}),
    )


def table(verdicts: Iterable[Verdict]) -> str:
    """The counts of one broker, in Markdown."""
    heads = ["fault", "struck", "deliveries", "doubled, lost, rolled back", "dead-lettered", "sent again"]
    heads += ["control: deliveries", "doubled, lost, rolled back", ""]
    rows: list[list[object]] = []
    for verdict in verdicts:
        kept, plain = verdict.kept, verdict.plain
        rows.append([verdict.fault, verdict.struck, f"{kept.deliveries} of {kept.expected}", _effects(kept)])
        rows[-1] += [verdict.dead_letters, verdict.lost_by_broker, plain.deliveries, _effects(plain)]
        rows[-1].append("✓" if verdict.passed else "✗")
    return markdown(heads, rows)


def _effects(found: Count) -> str:
    return f"{found.doubled}, {found.lost}, {found.ghosts}"


if __name__ == "__main__":
    sys.exit(main())
