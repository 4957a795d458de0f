"""``python -m testproject.demo``: one run against the database of ``DATABASE_URL``; the exit code is the verdict.

``manage.py demo`` starts it, once there is a database, as a process of its own: settings are read once, at the start.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import threading
import time
from types import FrameType

import django
from django.core.management import call_command
from rich.console import Console

from .client import Endpoint
from .plan import Plan, add_arguments, draw_charges, plan_from
from .report import SIDES, Report
from .server import Server, ServerError, serve
from .storm import Storm
from .tally import Tally
from .verdict import complaints, judge

PATHS = {"protected": "/charges/", "unprotected": "/unprotected/charges/"}
INTERRUPTED = 130
PARENT = os.getppid()


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
    except ServerError as error:
        console.print(f"FAILED. {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted. The server and its workers are stopped.")
        return INTERRUPTED


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A SIGTERM takes the way of a Ctrl-C, so that the server is stopped."""
    raise KeyboardInterrupt


def run(plan: Plan, report: Report) -> int:
    report.introduce()
    django.setup()
    from testproject.management.commands.create_demo_users import create_demo_users

    from .ledger import can_be_outlived, count_effects, count_take_overs, database_name, effects_of

    call_command("migrate", verbosity=0, interactive=False)
    tokens = create_demo_users()

    name = f"demo-{secrets.token_hex(4)}"
    tally = Tally()
    crashed: list[str] = []
    with serve(plan.workers, tally) as server:
        report.started(database_name(), server.port)
        endpoints = [Endpoint(side, server.port, PATHS[side], tokens) for side in SIDES]
        storm = Storm(plan, draw_charges(plan, name), endpoints, tally)
        started = time.monotonic()
        with (
            storm.running(),
            report.progress(tally, lambda side: count_effects(side, name), lambda: server.workers.kills) as update,
        ):
            threading.Thread(
                target=server.workers.kill_at_random, args=(plan.kill_every, plan.seed, storm.stop), daemon=True
            ).start()
            while not storm.wait(0.25):
                update()
                crashed = what_stopped(server, plan, time.monotonic() - started)
                if crashed:
                    break
        seconds = time.monotonic() - started
        if crashed:
            crashed.append(f"The server's log ends with:\n{server.log_tail()}")
    storm.join()
    # The server has ended, so nothing is under way any more and what is counted stays.
    findings = {side: judge(storm.histories[side], effects_of(side, name)) for side in SIDES}
    take_overs = count_take_overs(name)
    report.table(findings, tally, server.workers.kills, take_overs, seconds)
    seen = tally.of("protected")
    problems = crashed + complaints(
        findings["protected"], findings["unprotected"], seen, server.workers.kills, take_overs, can_be_outlived()
    )
    report.verdict(findings, problems, server.workers.kills)
    return 1 if problems else 0


def what_stopped(server: Server, plan: Plan, seconds: float) -> list[str]:
    """Why the storm must end before its time, or nothing."""
    if server.process.poll() is not None:
        return [f"The server ended by itself with exit code {server.process.returncode}."]
    if os.getppid() != PARENT:
        raise KeyboardInterrupt  # killed, and the database with it
    if seconds > plan.time_limit:
        return [f"The storm was not over after {plan.time_limit:.0f} s."]
    return []


if __name__ == "__main__":
    sys.exit(main())
