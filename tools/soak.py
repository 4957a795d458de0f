"""``python -m tools.soak``: run clients continuously, while a nemesis kills, freezes and stops the servers.

The exit code is 1 if a promise was broken or something grew. It is 2 if the run is void, because an act never struck or
the control doubled nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from testproject.harness.effects import judge_effects
from tests.harness.history import by_key, violations
from tests.harness.world import LONG_AGO, Database
from tests.results import note
from tests.soak.load import CONTROL, LEASE, NEW, RETRY, Load
from tests.soak.nemesis import JUMP, Nemesis
from tests.soak.servers import Servers
from tools.reports import markdown, say

#: The time within which everything must be idle after the clients have paused.
LIMIT = 120.0  # seconds
#: A leak is a size at the last checkpoint that exceeds the first half's maximum by this factor and this many bytes.
#: Two checkpoints are too few to detect one.
GROWTH, SLACK = 1.25, 4_000_000

#: The tables in which each kind's effects are counted, in addition to the provider's ledger.
TABLES = {"transfer": ["transfer"], "drawn": ["transfer"], "payout": ["payout"], "order": ["charge", "receipt"]}
IN_LEDGER = {"payout", CONTROL}

BUSY = """
SELECT (SELECT count(*) FROM idempotency_record WHERE status = 'in_progress')
     + (SELECT count(*) FROM idempotency_outbox_message WHERE status = 'pending')
"""
#: Records that only a retry or a redelivered message can finish.
INTERRUPTED = "SELECT count(*) FROM idempotency_record WHERE status = 'recoverable'"
AGE = "UPDATE idempotency_outbox_message SET created_at = created_at - {0}, sent_at = sent_at - {0}"
#: Only handles messages of tasks that the process has loaded.
RESEND = """
from datetime import timedelta
from testproject.celery import app
app.loader.import_default_modules()
from idempotency.contrib.celery import resend_lost_messages
resend_lost_messages(older_than=timedelta(0))
"""
SIZES = """
SELECT relname, pg_table_size(oid), pg_indexes_size(oid) FROM pg_class
WHERE relname IN ('idempotency_record', 'idempotency_outbox_message')
"""


@dataclass
class Judge:
    servers: Servers
    load: Load
    problems: list[str] = field(default_factory=list)
    #: The number of expected effects at the last checkpoint, and of effects that the control doubled.
    checked: int = 0
    control_doubled: int = 0
    #: The numbers of checked histories, of their calls, and of the control's histories that no record explains.
    histories: int = 0
    invocations: int = 0
    control_unexplained: int = 0
    sent_again: int = 0
    take_overs: int = 0
    #: The value of each measurement at each checkpoint.
    sizes: dict[str, list[int]] = field(default_factory=dict)

    def checkpoint(self) -> None:
        self.load.pause(LIMIT)
        self._check_histories()
        self.problems += self.load.problems + self.servers.ended()
        with closing(Database(self.servers.database.url)) as database:
            self._wait_until_idle(database)
            self._count_effects(database)
            self.take_overs += database.count("SELECT coalesce(sum(attempt - 1), 0) FROM idempotency_record")
            sessions = database.count("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
            self._measure(database, "full", {**self.servers.memory(), "connections": sessions})
            database.query("UPDATE idempotency_record SET expires_at = %s", LONG_AGO)
            database.query(AGE.format("interval '30 days'"))
            self.servers.run("manage.py", "purge_idempotency")
            database.query("VACUUM")
            # Without a checkpoint, an immediate stop would lose the free space map that VACUUM wrote.
            database.query("CHECKPOINT")
            self._measure(
                database, "purged", {"records, purged": database.count("SELECT count(*) FROM idempotency_record")}
            )

    def _check_histories(self) -> None:
        # A claim that was not released blocks its key for the lease, by a clock that may be set back in the meantime.
        lease = LEASE + JUMP
        self.histories += len(by_key(self.load.calls))
        self.invocations += len(self.load.calls)
        unexplained = violations(self.load.calls, lease=lease)
        self.problems += [f"P3, P5: no record explains {history}" for history in unexplained.values()]
        self.control_unexplained += len(violations(self.load.control_calls, lease=lease))
        self.load.calls.clear()
        self.load.control_calls.clear()

    def _wait_until_idle(self, database: Database) -> None:
        """Wait until nothing is claimed, pending or queued. Messages that Redis lost are resent."""
        deadline = time.monotonic() + (0 if self.problems else LIMIT)
        while time.monotonic() < deadline:
            self.servers.supervise()
            if not database.count(BUSY) and not self.servers.redis.count("celery"):
                missing = len(self.load.operations["order"]) - database.count(
                    "SELECT count(*) FROM testproject_receipt"
                )
                if missing <= 0 and not database.count(INTERRUPTED):
                    return
                self.sent_again += max(0, missing)
                database.query(AGE.format("interval '1 hour'"))
                self.servers.run("-c", RESEND)
            time.sleep(0.1)  # polls other processes
        left = f"{database.count(BUSY)} claims and messages, and {database.count(INTERRUPTED)} interrupted"
        self.problems.append(f"P7: not idle: {left}")

    def _count_effects(self, database: Database) -> None:
        self.checked = 0
        for kind, labels in self.load.operations.items():
            found = {table: database.transfers(kind, table) for table in TABLES.get(kind, ())}
            if kind in IN_LEDGER:
                found["ledger"] = self.servers.provider.payouts(kind)
            for place, effects in found.items():
                judged = judge_effects(effects, labels)
                if kind == CONTROL:
                    self.control_doubled = len(judged.doubled)
                    continue
                self.checked += len(labels)
                if judged.examples:
                    self.problems.append(
                        f"P1, P2: {judged.count} effects of {len(labels)} in {place}: {judged.examples}"
                    )

    def _measure(self, database: Database, when: str, measured: dict[str, int]) -> None:
        for table, heap, indexes in database.query(SIZES):
            measured |= {f"{table}, {when}": heap, f"its indexes, {table}, {when}": indexes}
        for name, size in measured.items():
            self.sizes.setdefault(name, []).append(size)

    def grown(self) -> list[str]:
        return [
            f"{name} grew: {sizes}"
            for name, sizes in self.sizes.items()
            if sizes[-1] > max(sizes[: max(2, len(sizes) // 2)]) * GROWTH + (2 if name == "connections" else SLACK)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="seed of the schedule")
    parser.add_argument("--checkpoint", type=int, default=50_000, help="requests between two counts of the effects")
    parser.add_argument("--pace", type=int, default=1_000, help="mean requests between two acts of the nemesis")
    options = parser.parse_args()
    say(f"seed {options.seed}; {NEW:.0%} of the requests begin an operation, {RETRY:.0%} retry one without an outcome")
    with ExitStack() as stack:
        servers = Servers(stack)
        load = Load(servers.port, options.seed)
        nemesis, judge = Nemesis(servers, load, options.seed), Judge(servers, load)
        schedule = list(nemesis.schedule(options.requests, options.pace))
        say("the schedule:", ", ".join(f"{act} at {at:,}" for at, act in schedule))
        started, seconds = time.monotonic(), 0.0
        for end in [*range(options.checkpoint, options.requests, options.checkpoint), options.requests]:
            load.start()
            while schedule and schedule[0][0] < end:
                at, act = schedule.pop(0)
                load.wait_for(at)
                nemesis.strike(act)
            load.wait_for(end)
            judge.checkpoint()
            seconds = time.monotonic() - started
            say(f"{seconds:,.0f} s: {judge.checked:,} effects; {dict(load.seen)}")
            if judge.problems:
                break
    return report(options.seed, seconds, load, nemesis, judge)


def report(seed: int, seconds: float, load: Load, nemesis: Nemesis, judge: Judge) -> int:
    times, controls = sorted(load.times), len(load.operations[CONTROL])
    figures = {
        "requests": load.seen["requests"],
        "operations": sum(map(len, load.operations.values())) - controls,
        "fired": nemesis.struck.total(),
        "violations": len(judge.problems),
        "seed": seed,
        "seconds": round(seconds),
        "p50": round(times[len(times) // 2] * 1000),
        "p99": round(times[len(times) * 99 // 100] * 1000),
        "late": load.seen["late"],
        "ambiguous": load.seen["ambiguous"],
        "take_overs": judge.take_overs,
        "sent_again": judge.sent_again,
        "controls": controls,
        "doubled": judge.control_doubled,
        "histories": judge.histories,
        "invocations": judge.invocations,
        "unexplained": judge.control_unexplained,
    }
    say(f"\n{figures}\n{load.seen['requests'] / seconds:.0f} requests a second; p50 and p99 are milliseconds")
    say(f"the clients took {time.process_time() / seconds:.0%} of a processor\n")
    say(markdown(["act", "planned", "struck"], [(act, n, nemesis.struck[act]) for act, n in nemesis.planned.items()]))
    rows = [[name, *(f"{sizes[place]:,}" for place in (0, len(sizes) > 1, -1))] for name, sizes in judge.sizes.items()]
    say(f"\n{markdown(['at a checkpoint', 'first', 'second', 'last'], rows)}\n")
    failed = [*judge.problems, *judge.grown()] or ([] if judge.checked else ["nothing was checked"])
    missed = [act for act in nemesis.acts if not nemesis.struck[act]]
    void = bool(missed or not judge.control_doubled or not judge.control_unexplained) and not failed
    if void:
        control = f"doubled {judge.control_doubled}, with {judge.control_unexplained} histories that no record explains"
        failed = [f"VOID: {missed} never struck; the control {control}"]
    say("\n".join(failed))
    note("soak", database="postgresql", **figures, **({"failed": "; ".join(failed)[:300]} if failed else {}))
    return 2 if void else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
