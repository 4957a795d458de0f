"""Kill a process at each of its system calls: strace traces one run, then kills a run at each call in the trace.

A signal is injected when a call begins, so the process dies after all earlier calls. strace counts calls by name, so a
call is identified by its name and the number of earlier calls with that name.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.cells import running
from tests.crash.points import Cell
from tests.harness.world import LONG_AGO
from tests.harness.zygote import ImpossibleError

JOBS = ("request", "sweep", "relay")
KILLED = "+++ killed by SIGKILL +++"
#: How often a kill is tried. If a response arrives before poll waits for it, a run has fewer calls than the traced run.
TRIES = 3


@dataclass
class Kills:
    """What the runs of one job came to."""

    calls: int = 0
    fired: int = 0
    problems: list[str] = field(default_factory=list)


def kill_at_each_call(world, job, *, stride=1, first=0, **spec):
    """:param stride: only each so many-th call, beginning with ``first``."""
    kills = Kills()
    trace, problems = _run(world, job, None, spec)
    if problems:
        raise ImpossibleError(f"undisturbed, the {job} fails: {problems}")
    names = re.findall(r"^(\w+)\(", trace, re.MULTILINE)
    seen = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        if place % stride == first % stride:
            kills.calls += 1
            for _ in range(TRIES):
                told, problems = _run(world, job, f"{name}:signal=KILL:when={seen[name]}", spec)
                kills.problems += [f"{job} killed at {name} {seen[name]}, call {place}: {each}" for each in problems]
                if KILLED in told:
                    kills.fired += 1
                    break
    return kills


def _run(world, job, injection, spec):
    """One run of the job, and what its retries find.

    :returns: strace's report, and what is wrong.
    """
    with running(world, Cell(job, "kill", "inside"), **spec) as run:
        try:
            if job == "sweep":
                run.kill_at("handler.before")
                run.end_lease()
            if job == "relay":
                run.observer.query("DELETE FROM idempotency_outbox_message")
                run.answered(run.fork("publish"))
            report = _trace(run, run.fork(job, held=True), injection)
            if job == "relay":
                _judge_messages(run)
            else:
                run.converge()
                run.judge()
        except (ImpossibleError, TimeoutError) as error:
            return "", [str(error)]
        return report, run.verdict.problems


def _trace(run, worker, injection):
    worker.expect("reached")
    with tempfile.NamedTemporaryFile(prefix="strace-") as report:
        command = ["strace", "-p", str(worker.pid), "-o", report.name]
        with subprocess.Popen(
            command + ([f"--inject={injection}"] if injection else []), stderr=subprocess.PIPE, text=True
        ) as strace:
            if "attached" not in strace.stderr.readline():
                raise ImpossibleError("strace can't attach to a process")
            worker.go()
            event = worker.hear()
            if event is not None:
                worker.hear()
                if "status" in event:
                    run.answers.append(event)
        run.observer.wait_until_gone()
        return Path(report.name).read_text(encoding="utf-8", errors="replace")


def _judge_messages(run):
    """After its lease another relay sends what is left, and the consumer, which deduplicates, has each message once."""
    free = "UPDATE idempotency_outbox_message SET lease_expires_at = %s WHERE status = 'pending'"
    run.observer.query(free, LONG_AGO)
    run.answered(run.fork("relay"))
    messages = run.observer.query("SELECT message_id, status FROM idempotency_outbox_message")
    wanted = sorted(str(message).replace("-", "") for message, _ in messages)
    ledger = run.provider.effects()
    keys = sorted(key for key in (str(effect.key).replace("-", "") for effect in ledger) if key in wanted)
    if len(wanted) != 2 or keys != wanted or {status for _, status in messages} != {"sent"}:
        run.problem(f"of {messages} the consumer has {keys}")
