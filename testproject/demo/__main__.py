"""``python -m testproject.demo``: one run against the database of ``DATABASE_URL``; the exit code is the verdict.

``manage.py demo`` starts it, once there is a database, as a process of its own: settings are read once, at the start.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import django
from django.core.management import call_command
from rich.console import Console

from testproject.provider import ProviderError, running_provider
from testproject.provider.client import ProviderFailedError
from testproject.provider.client import counts as provider_counts

from .client import Endpoint
from .payouts import REEXECUTED, Side, draw_payouts, run_of
from .payouts import SIDES as PAYOUT_SIDES
from .plan import Plan, add_arguments, draw_charges, plan_from
from .report import SIDES, Report, Stage
from .server import Server, ServerError, serve
from .storm import Storm
from .tally import Tally
from .verdict import Findings, complaints, judge, payout_complaints

#: What the API allows its provider: shorter than a call is valid, with the lease of two seconds.
PROVIDER_TIMEOUT = 0.5  # seconds
PATIENCE_WITH_PROVIDER = 15.0

#: Fewer payouts than charges at once, and no worker dies but for one of them. Otherwise a killed worker would take most
#: of them with it before they called the provider, and there would be little to find there.
CALMER = 3

PATHS = {"protected": "/charges/", "unprotected": "/unprotected/charges/"}
INTERRUPTED = 130
PARENT = os.getppid()
interrupted = threading.Event()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testproject.demo", description=__doc__)
    add_arguments(parser)
    plan = plan_from(vars(parser.parse_args()))
    signal.signal(signal.SIGTERM, interrupt)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    # Like a production server, but a killed worker's claim is respected for seconds. With the default lease of a
    # minute the demo would mostly wait.
    os.environ.update(DEBUG="false", ALLOWED_HOSTS="127.0.0.1", IDEMPOTENCY_LEASE_SECONDS=str(plan.lease))
    console = Console(highlight=False)
    try:
        return run(plan, Report(console, plan))
    except (ServerError, ProviderError, ProviderFailedError) as error:
        console.print(f"FAILED. {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted. The server and its workers are stopped.")
        return INTERRUPTED


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A SIGTERM takes the way of a Ctrl-C, so that the server is stopped."""
    interrupted.set()
    raise KeyboardInterrupt


def run(plan: Plan, report: Report) -> int:
    report.introduce()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
        providers = Providers(stack, directory)
        # Read by the settings, here and in the server.
        os.environ.update(
            PROVIDER_URL=providers.plain,
            DEDUPLICATING_PROVIDER_URL=providers.deduplicating,
            PROVIDER_TIMEOUT=str(PROVIDER_TIMEOUT),
        )
        django.setup()
        return run_on(plan, report, providers)


class Providers:
    """Two stand-in providers: one for REEXECUTE, which relies on deduplication, and one that never deduplicates."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._ledgers = {name: directory / f"{name}.jsonl" for name in ("deduplicating", "plain")}
        self.deduplicating = stack.enter_context(running_provider(self._ledgers["deduplicating"], deduplicate=True))
        self.plain = stack.enter_context(running_provider(self._ledgers["plain"]))

    def ledger_of(self, side: Side) -> Path:
        return self._ledgers["deduplicating" if side is REEXECUTED else "plain"]


def run_on(plan: Plan, report: Report, providers: Providers) -> int:
    from testproject.management.commands.create_demo_users import create_demo_users

    from . import ledger

    call_command("migrate", verbosity=0, interactive=False)
    tokens = create_demo_users()

    name = f"demo-{secrets.token_hex(4)}"
    tally = Tally()
    with serve(plan.workers, tally) as server:
        report.started(ledger.database_name(), server.port)

        charges = draw_charges(plan, name)
        storm = Storm(plan, [(Endpoint(side, server.port, PATHS[side], tokens), charges) for side in SIDES], tally)
        stage = Stage("charges", plan.operations, {side: partial(ledger.count_effects, side, name) for side in SIDES})
        seconds, crashed = weather(storm, stage, server, plan, report, tally, kill_at_random=True)
        kills = server.workers.kills

        courses = [
            (Endpoint(side.name, server.port, side.path, tokens), draw_payouts(plan, side, name))
            for side in PAYOUT_SIDES
        ]
        payouts = Storm(replace(plan, concurrency=max(1, plan.concurrency // CALMER)), courses, tally)
        counts = {
            side.name: partial(ledger.count_payouts, side, name, providers.ledger_of(side)) for side in PAYOUT_SIDES
        }
        stage = Stage("payouts", plan.payouts, counts, "in the provider's ledger")
        payout_seconds = 0.0
        if not crashed:
            payout_seconds, crashed = weather(payouts, stage, server, plan, report, tally)
        deduplicated = provider_counts(providers.deduplicating, timeout=PATIENCE_WITH_PROVIDER)["deduplicated"]
    storm.join()
    payouts.join()

    # The server has ended, so nothing is under way any more and what is counted stays.
    findings, problems = judge_charges(storm, tally, report, name, kills, seconds)
    findings_of_payouts: dict[str, Findings] = {}
    if payout_seconds:
        findings_of_payouts, more = judge_payouts(payouts, tally, report, name, providers, deduplicated, payout_seconds)
        problems += more
    report.verdict(findings, findings_of_payouts, crashed + problems, server.workers.kills)
    return 1 if crashed or problems else 0


def judge_charges(
    storm: Storm, tally: Tally, report: Report, name: str, kills: int, seconds: float
) -> tuple[dict[str, Findings], list[str]]:
    """What was found on both sides, now shown in a table, and every reason to call it a failure."""
    from . import ledger

    findings = {side: judge(storm.histories[side], ledger.effects_of(side, name)) for side in SIDES}
    take_overs = ledger.count_take_overs(name)
    report.table(findings, tally, kills, take_overs, seconds)
    seen = tally.of("protected")
    return findings, complaints(
        findings["protected"], findings["unprotected"], seen, kills, take_overs, ledger.can_be_outlived()
    )


def judge_payouts(
    storm: Storm, tally: Tally, report: Report, name: str, providers: Providers, deduplicated: int, seconds: float
) -> tuple[dict[str, Findings], list[str]]:
    """The same for the payouts."""
    from . import ledger

    findings, made = {}, {}
    for side in PAYOUT_SIDES:
        histories = storm.histories[side.name]
        planned = [history.charge for history in histories]
        made[side.name] = ledger.payouts_of(side, name, providers.ledger_of(side), planned)
        findings[side.name] = judge(histories, made[side.name], named_by="provider_id", may_park=side.may_park)
    rows = {side.name: ledger.count_rows(side, name) for side in PAYOUT_SIDES}
    again = ledger.count_take_overs(run_of(REEXECUTED, name))
    report.payout_table(findings, rows, tally, again, deduplicated, seconds)
    report.parked(findings["park"].parked, made["park"])
    seen = {side.name: tally.of(side.name) for side in PAYOUT_SIDES}
    return findings, payout_complaints(findings, rows, seen, again, deduplicated)


def weather(
    storm: Storm,
    stage: Stage,
    server: Server,
    plan: Plan,
    report: Report,
    tally: Tally,
    *,
    kill_at_random: bool = False,
) -> tuple[float, list[str]]:
    """Let the storm rage to its end: how many seconds that took, and why it ended before its time."""
    started = time.monotonic()
    crashed: list[str] = []
    kills_before = server.workers.kills
    with (
        storm.running(),
        report.progress(stage, tally, lambda: server.workers.kills - kills_before) as update,
    ):
        if kill_at_random:
            threading.Thread(
                target=server.workers.kill_at_random, args=(plan.kill_every, plan.seed, storm.stop), daemon=True
            ).start()
        while not storm.wait(0.25):
            update()
            crashed = what_stopped(server, plan, time.monotonic() - started)
            if crashed:
                crashed.append(f"The server's log ends with:\n{server.log_tail()}")
                break
    return time.monotonic() - started, crashed


def what_stopped(server: Server, plan: Plan, seconds: float) -> list[str]:
    """Why the storm must end before its time, or nothing."""
    if server.process.poll() is not None:
        return [f"The server ended by itself with exit code {server.process.returncode}."]
    if interrupted.is_set():
        raise KeyboardInterrupt  # the first one was raised where nothing can be, as in a destructor
    if os.getppid() != PARENT:
        raise KeyboardInterrupt  # killed, and the database with it
    if seconds > plan.time_limit:
        return [f"The storm was not over after {plan.time_limit:.0f} s."]
    return []


if __name__ == "__main__":
    sys.exit(main())
