"""The processes of one operation, and the judgement of what they left, by the ledger and the database."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from testproject.harness.effects import judge_effects
from tests.crash.points import Cell
from tests.harness.zygote import ImpossibleError

#: How long fresh processes try to learn the outcome, in seconds. What takes longest is a claim whose owner is frozen
#: inside the transaction that holds the record's lock, until the database ends that session after five seconds.
LIMIT = 20.0


@dataclass
class Verdict:
    cell: Cell
    problems: list[str] = field(default_factory=list)
    fired: bool = False
    doubled: int = 0
    lost: int = 0
    stale_writes: int = 0
    parked: bool = False
    processes: int = 0

    @property
    def passed(self):
        return self.fired and not self.problems

    def __str__(self):
        return f"{self.cell}: {'; '.join(self.problems) or 'ok'}"


class Processes:
    """The processes of one cell, and what they were told."""

    #: What every worker is told besides.
    spec: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, arena, cell, observer, name, verdict):
        self.arena = arena
        self.cell = cell
        self.observer = observer
        self.operation = f"crash.{name}"
        self.key = f"key-{name}"
        self.verdict = verdict
        self.deduplicate = cell.declaration in {"inside", "again"}
        #: What callers were answered, in the order in which they asked.
        self.answers = []
        self._workers = []

    # Processes

    def fork(self, job="request", **spec):
        worker = self.arena.zygote.fork(
            **{
                "job": job,
                "declaration": self.cell.declaration,
                "operation": self.operation,
                "key": self.key,
                "provider": self.arena.provider(deduplicate=self.deduplicate).url,
                "pooled": self.arena.pooler is not None,
                "database": None if self.observer.path is None else str(self.observer.path),
                **self.spec,
                **spec,
            }
        )
        self._workers.append(worker)
        self.verdict.processes += 1
        return worker

    def end(self):
        """Kill the workers that are left, held at a place or frozen."""
        for worker in self._workers:
            worker.end()

    def ask(self, **spec):
        """A request from a fresh process."""
        return self.answered(self.fork(**spec))

    def answered(self, worker):
        event = worker.expect("done")
        worker.hear()
        if "status" in event:
            self.answers.append(event)
        return event

    def kill_at(self, point, **spec):
        worker = self.fork(arms=[[point, "kill"]], **spec)
        worker.expect("reached")
        self.bury(worker)

    def bury(self, worker):
        """Wait until a killed process is gone, and the database has noticed."""
        if worker.hear() is not None:
            raise ImpossibleError("a killed process goes on")
        self.observer.wait_until_gone(self.operation)

    def end_lease(self):
        self.observer.end_lease(self.operation, self.key)

    def converge(self):
        """Fresh processes ask until one knows the outcome."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            answer = self.ask()
            if answer["status"] < 300 or answer["code"] == "idempotency_outcome_unknown":
                return
            if answer["status"] not in {409, 500, 503}:
                raise ImpossibleError(f"an answer that makes no sense: {answer}")
            self.end_lease()
        raise ImpossibleError(f"P7: no process learned the outcome within {LIMIT:g} s; the last answer was {answer}")

    # Judging

    def problem(self, what):
        self.verdict.problems.append(what)

    def payouts(self):
        return self.arena.payouts(self.operation, self.key, deduplicate=self.deduplicate)

    def judge(self):
        for _ in range(2):
            answer = self.ask()
            if answer["status"] < 300 and not answer["replayed"]:
                self.problem(f"P5: a retry after the outcome was taken for a new request: {answer}")
        record = self.observer.record(self.operation)
        if record is None:
            self.problem("P7: the record is gone")
            return
        self.verdict.parked = record["status"] == "parked"
        if record["status"] == "in_progress" or record["status"] == "recoverable":
            self.problem(f"P7: the record never came to rest: {record}")
        if self.verdict.parked and self.cell.declaration != "park":
            self.problem("parked, although its declaration knows what to do")
        given = [answer for answer in self.answers if answer["status"] < 300]
        if len({(answer["status"], answer["body"]) for answer in given}) > 1:
            self.problem(f"P3, P5: callers were told different outcomes: {given}")
        if given and self.answers[-1]["status"] >= 300:
            self.problem(f"P5: an outcome was given, and then taken back: {self.answers}")
        self._count(record, acknowledged=bool(given))

    def _count(self, record, *, acknowledged):
        verdict = self.verdict
        effects = {"payout": len(self.payouts())}
        if self.cell.declaration == "inside":
            writes = self.observer.writes(self.key)
            effects["row"] = len(writes)
            stale = [attempt for attempt in writes if attempt != f"attempt {record['attempt']}"]
            verdict.stale_writes = len(stale)
            if stale:
                self.problem(f"P6: attempt {record['attempt']} completed, and there are writes of {stale}")
        body = record["response_body"]
        if record["status"] == "completed" and body["attempt"] != record["attempt"]:
            self.problem(f"P6: attempt {record['attempt']} owned the record, and {body} was recorded")
        judged = judge_effects(effects, effects, effects if acknowledged else ())
        verdict.doubled, verdict.lost = len(judged.doubled), len(judged.lost)
        if verdict.doubled:
            self.problem(f"P1: doubled: {effects}")
        if verdict.lost:
            self.problem(f"P2: acknowledged and lost: {effects}")
