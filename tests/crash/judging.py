"""The verdict on one cell: its effects, its record, and the history of its callers."""

from dataclasses import dataclass, field

from testproject.harness.effects import judge_effects
from tests.crash.points import WITH_ROWS, Cell
from tests.harness.answers import facts_of, recorded_facts
from tests.harness.history import IN_PROGRESS, Call, violations

#: The error of a wrong clock, in seconds. No lease is longer.
HOUR = 3600.0


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


class Judged:
    """The part of ``Run`` that judges it."""

    def problem(self, what):
        self.verdict.problems.append(what)

    def payouts(self, label=None):
        """The provider's payments for the operation, under any key, from its ledger."""
        return [effect for effect in self.provider.effects() if effect.label == (label or self.key)]

    def effects(self, label, facts):
        """How often each effect of the operation has happened. An effect reported as undone must not exist."""
        effects = {"payout": len(self.payouts(label))}
        rows = len(self.observer.writes(label)) if self.cell.declaration in WITH_ROWS else None
        if rows is not None and facts.get("kind") == "undone":
            effects["undone row"] = 1 + rows
        elif rows is not None:
            effects["row"] = rows
        return effects

    def judge(self):
        for _ in range(2):
            self.ask()
        record = self.observer.record(self.key)
        if record is None:
            self.problem("P7: the record is gone")
            return
        self.verdict.parked = record["status"] == "parked"
        if self.verdict.parked:
            self.observer.end_retention()
            self.ask()  # gets the same answer, because retention ends what is known
            record = self.observer.record(self.key)
        if record["status"] == "in_progress" or record["status"] == "recoverable":
            self.problem(f"P7: the record was never settled: {record}")
        if self.verdict.parked and self.cell.declaration != "park":
            self.problem("parked, although it isn't declared PARK")
        calls = [Call.of(answer["call"]) for answer in self.answers]
        # A broken process that can no longer prove its claim may get the answer that this claim is in progress.
        answered = {call.id: call for call in calls if call.answer != IN_PROGRESS or call.id not in self.broken}
        # The cell ends the leases, so a claim may block for any time.
        for history in violations((answered.get(call.id, call) for call in self.calls), lease=HOUR).values():
            self.problem(f"P3, P5: no record explains {history}")
        given = [answer for answer in self.answers if facts_of(answer["body"])]
        if given and not facts_of(self.answers[-1]["body"]):
            self.problem(f"P5: an outcome was returned and later withdrawn: {self.answers}")
        self._count(record, acknowledged=bool(given))

    def _count(self, record, *, acknowledged):
        verdict, facts = self.verdict, {}
        if record["status"] == "completed":
            facts = recorded_facts(record["response_body"], record["response_reference"])
            if facts["attempt"] != record["attempt"]:
                self.problem(f"P6: attempt {record['attempt']} owned the record, but {facts} was recorded")
        effects = self.effects(self.key, facts)
        if "row" in effects:
            stale = [each for each in self.observer.writes(self.key) if each != f"attempt {record['attempt']}"]
            verdict.stale_writes = len(stale)
            if stale:
                self.problem(f"P6: attempt {record['attempt']} completed, but there are writes of {stale}")
        judged = judge_effects(effects, effects, effects if acknowledged else ())
        verdict.doubled, verdict.lost = len(judged.doubled), len(judged.lost)
        if verdict.doubled:
            self.problem(f"P1: doubled: {effects}")
        if verdict.lost:
            self.problem(f"P2: acknowledged and lost: {effects}")
