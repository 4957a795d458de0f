"""The judgement, without I/O: what the clients were told against what is found where effects happen.

An answer proves nothing but itself. All that is counted of one side of an act comes together in its ``Findings``, and
the act's rows say what each figure must be.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from testproject.harness.effects import judge_effects

from .acts import MESSAGES, Act, Side
from .client import Answer
from .plan import Charge

LISTED = 3  # examples of each kind


@dataclass
class History:
    """All that the clients of one charge were told in the end, on one side."""

    charge: Charge
    answers: list[Answer] = field(default_factory=list)  # to the charge's own payload
    answers_to_changed: list[Answer] = field(default_factory=list)  # to another payload under its key
    gave_up: int = 0  # clients that never got a final answer

    @property
    def acknowledged(self) -> bool:
        return any(200 <= answer.status < 300 for answer in self.answers)


@dataclass
class Findings:
    """What was found on one side: figures by their names, and the first few of whatever is wrong."""

    figures: Counter[str]
    parked: list[str] = field(default_factory=list)  # labels of those whose clients were told "unknown"
    examples: list[str] = field(default_factory=list)


def judge(act: Act, side: Side, histories: Sequence[History], effects: Mapping[str, Sequence[int]]) -> Findings:
    """Compare every client's answers with each other and with the effects of their charge.

    :param effects: the ids of what each charge left behind, by its name.
    """
    accepted = [history.charge.name for history in histories if not history.charge.declined]
    acknowledged = [history.charge.name for history in histories if history.acknowledged]
    found = judge_effects({name: len(ids) for name, ids in effects.items()}, accepted, acknowledged)
    wrong = [
        f"wrong: {history.charge.name} ({history.charge.trouble.value}) {problem}"
        for history in histories
        for problem in wrong_answers(act, side, history, effects.get(history.charge.name, ()))
    ]
    unsettled = [f"never learned: {history.charge.name}" for history in histories if history.gave_up]
    parked = [history.charge.label for history in histories if history.answers and is_parked(history.answers[0])]
    figures = Counter(
        operations=len(histories),
        accepted=len(accepted),
        declined=len(histories) - len(accepted),
        expected=len(accepted),
        effects=found.count,
        doubled=len(found.doubled),
        lost=len(found.lost),
        ghosts=len(found.ghosts),
        wrong=len(wrong),
        unsettled=len(unsettled),
        parked=len(parked),
    )
    return Findings(figures, parked, [*found.examples, *wrong[:LISTED], *unsettled[:LISTED]])


def judge_messages(answers: Findings, histories: Sequence[History], effects: Mapping[str, int]) -> Findings:
    """What came of the messages of orders. What the orders themselves left behind counts with the answers.

    :param answers: what was found of the orders' answers and charges.
    :param effects: how often each message took effect, by its name.
    """
    accepted = [history for history in histories if not history.charge.declined]

    def of(some: Iterable[History]) -> list[str]:
        return [f"{message}.{history.charge.label}" for history in some for message in MESSAGES]

    found = judge_effects(effects, of(accepted), of(history for history in accepted if history.acknowledged))
    figures = Counter(answers.figures)
    figures["wrong"] += sum(figures[kind] for kind in ("doubled", "lost", "ghosts"))
    figures["expected"] = found.expected
    figures["effects"] = found.count - sum(effects[name] for name in found.ghosts)
    figures["ghosts"] = sum(effects[name] for name in found.ghosts)
    figures["doubled"], figures["lost"] = len(found.doubled), len(found.lost)
    return Findings(figures, answers.parked, [*found.examples, *answers.examples])


def wrong_answers(act: Act, side: Side, history: History, ids: Sequence[int]) -> Iterator[str]:
    """Every answer that is not the charge's one outcome, with the reason."""
    for answer in history.answers:
        if reason := wrong_with(act, side, history, answer, ids):
            yield f"was answered {answer.status} {answer.body[:200]!r}: {reason}"
    for answer in history.answers_to_changed:
        if (answer.status, answer.code) != (422, "idempotency_key_reused"):
            yield f"with another payload was answered {answer.status} instead of 422"


def wrong_with(act: Act, side: Side, history: History, answer: Answer, ids: Sequence[int]) -> str:
    """Why the answer is not the charge's one outcome, or nothing."""
    first, due = history.answers[0], 402 if history.charge.declined else 201
    parked = side.may_park and is_parked(answer)
    if answer.status != due and not parked:
        return f"a charge that is sent with its own payload is answered {due}"
    if answer.outcome != first.outcome:
        return f"another client was answered {first.status} {first.body[:200]!r}"
    if parked or history.charge.declined:
        return ""
    try:
        named = json.loads(answer.body)[act.named_by]
    except (ValueError, KeyError, TypeError):
        return "it names no charge"
    return "" if named in ids or not ids else f"it names charge {named}, but the effect is {list(ids)}"


def is_parked(answer: Answer) -> bool:
    return answer.code == "idempotency_outcome_unknown"


def complaints(act: Act, findings: Mapping[str, Findings]) -> list[str]:
    """Every reason to call the act a failure, in words; none if it passed."""
    found = []
    for row in act.rows:
        for side in act.sides:
            figures, must = findings[side.name].figures, row.must_be(side)
            value = figures[row.figure]
            if must is not None and not must.holds(value, figures):
                found.append(f"{act.noun}, {side.title}: {row.label}: {value:,}; must be {must.words}.")
    return found
