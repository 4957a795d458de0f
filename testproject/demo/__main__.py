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

from . import orders as hop_orders
from .broker import Redis, RedisMissingError, running_redis
from .client import Endpoint
from .hop import Hop, running_hop
from .payouts import REEXECUTED, Side, draw_payouts, run_of
from .payouts import SIDES as PAYOUT_SIDES
from .plan import Plan, add_arguments, draw_charges, plan_from
from .processes import ProcessError, guarded
from .report import SIDES, HopSeen, Report, Stage
from .server import Server, ServerError, serve
from .storm import Storm
from .tally import Tally
from .verdict import Findings, HopFindings, complaints, hop_complaints, judge, judge_orders, payout_complaints

#: What the API allows its provider: shorter than a call is valid, with the lease of two seconds.
PROVIDER_TIMEOUT = 0.5  # seconds
PATIENCE_WITH_PROVIDER = 15.0

#: Fewer payouts than charges at once, and no worker dies but for one of them. Otherwise a killed worker would take most
#: of them with it before they called the provider, and there would be little to find there.
CALMER = 3

PATHS = {"protected": "/charges/", "unprotected": "/unprotected/charges/"}
#: What would lead the demo's messages to another broker than its own.
ANOTHER_BROKERS = (
    *("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL"),
    *("RESULT_BACKEND", "CELERY_RESULT_BACKEND", "CELERY_TASK_ALWAYS_EAGER"),
)
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
    for name in ANOTHER_BROKERS:
        os.environ.pop(name, None)
    console = Console(highlight=False)
    try:
        return run(plan, Report(console, plan))
    except (ServerError, ProcessError, ProviderError, ProviderFailedError) as error:
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
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
        backstage = Backstage(stack, directory)
        report.introduce(backstage.missing)
        providers = Providers(stack, directory)
        # Read by the settings, here and in the server.
        os.environ.update(
            PROVIDER_URL=providers.plain,
            DEDUPLICATING_PROVIDER_URL=providers.deduplicating,
            PROVIDER_TIMEOUT=str(PROVIDER_TIMEOUT),
        )
        if backstage.redis is not None:
            os.environ["BROKER_URL"] = backstage.redis.url
        django.setup()
        return run_on(plan, report, providers, backstage)


class Backstage:
    """What runs behind the server: a Redis, if there is one to start, and who looks after the processes there."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.directory = directory
        self.guard = stack.enter_context(guarded())
        self.redis: Redis | None = None
        self.missing = ""
        try:
            self.redis = stack.enter_context(running_redis(self.guard))
        except RedisMissingError as error:
            self.missing = str(error)


class Providers:
    """Two stand-in providers: one for REEXECUTE, which relies on deduplication, and one that never deduplicates."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._ledgers = {name: directory / f"{name}.jsonl" for name in ("deduplicating", "plain")}
        self.deduplicating = stack.enter_context(running_provider(self._ledgers["deduplicating"], deduplicate=True))
        self.plain = stack.enter_context(running_provider(self._ledgers["plain"]))

    def ledger_of(self, side: Side) -> Path:
        return self._ledgers["deduplicating" if side is REEXECUTED else "plain"]

    def ledger_of_orders(self, side: hop_orders.Side) -> Path:
        return self._ledgers["deduplicating" if side is hop_orders.OUTBOX else "plain"]


def run_on(plan: Plan, report: Report, providers: Providers, backstage: Backstage) -> int:
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
        calmer = replace(plan, concurrency=max(1, plan.concurrency // CALMER))
        payouts = Storm(calmer, courses, tally)
        counts = {
            side.name: partial(ledger.count_payouts, side, name, providers.ledger_of(side)) for side in PAYOUT_SIDES
        }
        stage = Stage("payouts", plan.payouts, counts, "in the provider's ledger")
        payout_seconds = 0.0
        if not crashed:
            payout_seconds, crashed = weather(payouts, stage, server, plan, report, tally)
        deduplicated = provider_counts(providers.deduplicating, timeout=PATIENCE_WITH_PROVIDER)["deduplicated"]

        drawn = {side: hop_orders.draw_orders(plan, side, name) for side in hop_orders.SIDES}
        orders = Storm(
            calmer, [(Endpoint(side.name, server.port, side.path, tokens), drawn[side]) for side in drawn], tally
        )
        hop: Hop | None = None
        hop_seconds = 0.0
        if backstage.redis is not None and not crashed:
            counts = {
                side.name: partial(ledger.count_hop_effects, side, name, providers.ledger_of_orders(side))
                for side in drawn
            }
            stage = Stage("orders", plan.orders, counts, "of their messages")
            with running_hop(backstage.redis, backstage.guard, plan, backstage.directory, name, drawn) as hop:
                hop_seconds, crashed = weather(orders, stage, server, plan, report, tally, hop=hop)
    storm.join()
    payouts.join()
    orders.join()

    # The server has ended, so nothing is under way any more and what is counted stays.
    findings, problems = judge_charges(storm, tally, report, name, kills, seconds)
    findings_of_payouts: dict[str, Findings] = {}
    if payout_seconds:
        findings_of_payouts, more = judge_payouts(payouts, tally, report, name, providers, deduplicated, payout_seconds)
        problems += more
    findings_of_hop: dict[str, HopFindings] = {}
    if hop is not None:
        findings_of_hop, more = judge_hop(hop, orders, tally, report, name, providers, hop_seconds)
        problems += more
    elif backstage.redis is None:
        report.no_hop(backstage.missing)
    report.verdict(findings, findings_of_payouts, findings_of_hop, crashed + problems, server.workers.kills)
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


def judge_hop(
    hop: Hop, storm: Storm, tally: Tally, report: Report, name: str, providers: Providers, seconds: float
) -> tuple[dict[str, HopFindings], list[str]]:
    """The same for the orders and their messages."""
    from . import ledger

    killer, sides = hop.killer, hop_orders.SIDES
    findings = {
        side.name: judge_orders(
            storm.histories[side.name],
            ledger.order_charges(side, name),
            ledger.hop_effects(side, name, providers.ledger_of_orders(side)),
        )
        for side in sides
    }
    report.hop_table(
        HopSeen(
            findings,
            tally,
            messages=[ledger.count_messages(name), len(killer.messages[hop_orders.DIRECT])],
            deliveries=[killer.deliveries[side] for side in sides],
            replays=killer.replays,
            kills=killer.kills,
            seconds=seconds,
        )
    )
    seen = tally.of(hop_orders.OUTBOX.name)
    return findings, hop_complaints(findings, killer.kills, seen, killer.replays)


def weather(
    storm: Storm,
    stage: Stage,
    server: Server,
    plan: Plan,
    report: Report,
    tally: Tally,
    *,
    kill_at_random: bool = False,
    hop: Hop | None = None,
) -> tuple[float, list[str]]:
    """Let the storm rage to its end, and what it has set off behind the server to its own.

    How many seconds that took, and why it ended before its time.
    """
    started = time.monotonic()
    crashed: list[str] = []
    kills_before = server.workers.kills
    with (
        storm.running(),
        report.progress(
            stage, tally, lambda: server.workers.kills - kills_before + (0 if hop is None else hop.kills)
        ) as update,
    ):
        if kill_at_random:
            threading.Thread(
                target=server.workers.kill_at_random, args=(plan.kill_every, plan.seed, storm.stop), daemon=True
            ).start()
        while not storm.wait(0.25) or (hop is not None and not hop.is_over()):
            update()
            crashed = what_stopped(server, plan, time.monotonic() - started)
            crashed += [] if hop is None else hop.what_stopped()
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
