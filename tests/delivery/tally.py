"""The effects under one fault, counted where they happen, and judged."""

from collections import Counter
from dataclasses import dataclass, field

from testproject.harness.effects import judge_effects
from tests.delivery import names


@dataclass
class Count:
    """The effects of one kind of message. Each of ``expected`` messages must have one, and no other message any."""

    expected: int = 0
    #: Messages with more than one row, or more than one payout.
    doubled: int = 0
    #: Published messages without a row, or without a payout.
    lost: int = 0
    #: Messages of rolled-back transactions that took effect.
    ghosts: int = 0
    deliveries: int = 0
    #: Some of the wrong messages.
    examples: list[str] = field(default_factory=list)

    def __str__(self):
        return (
            f"{self.expected} messages in {self.deliveries} deliveries: "
            f"doubled {self.doubled}, lost {self.lost}, ghosts {self.ghosts}"
        )


@dataclass
class Verdict:
    fault: str
    broker: str
    kept: Count = field(default_factory=Count)
    plain: Count = field(default_factory=Count)
    #: How often the fault has happened.
    struck: int = 0
    #: Protected messages that the broker had confirmed and then lost, and that were sent again.
    lost_by_broker: int = 0
    #: Protected messages that were dead-lettered.
    dead_letters: int = 0
    #: All other problems.
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self):
        return not self.problems

    def expect(self, condition, problem):
        if not condition:
            self.problems.append(problem)

    def __str__(self):
        result = "; ".join(self.problems) or "ok"
        return (
            f"{self.fault} on {self.broker}: {result} (struck {self.struck}; protected {self.kept}; "
            f"control {self.plain}; {self.seconds:.0f} s)"
        )


def count(scene, kind, expected, leave_out=()):
    """Compare what was published with the rows in the database and the provider's ledger."""
    wanted, others = set(expected), set(leave_out)
    rows, payouts, deliveries = (
        Counter({label: number for label, number in found.items() if label not in others})
        for found in (scene.rows(kind), scene.payouts(kind), scene.deliveries_of(kind))
    )
    in_rows, in_ledger = judge_effects(rows, wanted), judge_effects(payouts, wanted)
    return Count(
        expected=len(wanted),
        doubled=len({*in_rows.doubled, *in_ledger.doubled}),
        lost=len({*in_rows.lost, *in_ledger.lost}),
        ghosts=len({*in_rows.ghosts, *in_ledger.ghosts}),
        deliveries=deliveries.total(),
        examples=in_rows.examples + in_ledger.examples,
    )


def judge(scene, verdict, kept=None, plain=None, *, dead_letters=0, cut_off=0, leave_out=()):
    """What must hold after every fault.

    :param kept: the protected messages that must have taken effect; by default all.
    :param plain: likewise, for the control's messages.
    :param dead_letters: how many protected messages must have been dead-lettered.
    :param cut_off: how many of these had interrupted runs, so that their records are not completed.
    :param leave_out: protected messages to ignore.
    """
    left_out = set(leave_out)
    verdict.kept = count(scene, "kept", scene.labels("kept") if kept is None else kept, left_out)
    verdict.plain = count(scene, "plain", scene.labels("plain") if plain is None else plain)
    for name in ("doubled", "lost", "ghosts"):
        if number := getattr(verdict.kept, name):
            verdict.problems.append(f"{number} protected messages {name}: {verdict.kept.examples}")
    verdict.expect(verdict.struck, "the fault never struck")
    verdict.dead_letters = len(scene.dead_letters())
    verdict.expect(
        verdict.dead_letters == dead_letters,
        f"{verdict.dead_letters} messages were dead-lettered instead of {dead_letters}",
    )
    states = Counter(
        dict(
            scene.database.query(
                "SELECT record.status, count(*) FROM idempotency_record AS record "
                "JOIN idempotency_outbox_message AS message USING (idempotency_key) "
                "WHERE record.operation = %s AND message.payload ->> 'label' LIKE %s GROUP BY record.status",
                names.KEPT,
                f"{scene.name}-%",
            )
        )
    )
    verdict.expect(
        states == Counter(completed=verdict.kept.expected + len(left_out), recoverable=cut_off),
        f"the records are {dict(states)}",
    )
