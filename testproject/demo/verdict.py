"""The judgement, without I/O: what the clients were told against what the database holds.

An effect is a charge in the database; an answer proves nothing but itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .client import Answer
from .plan import Charge
from .tally import Seen

#: (account, label) → the ids of the rows that the charge of that label left behind
Effects = Mapping[tuple[str, str], Sequence[int]]


@dataclass
class History:
    """All that the clients of one charge were told in the end, on one side."""

    charge: Charge
    answers: list[Answer] = field(default_factory=list)  # to the charge's own payload
    answers_to_changed: list[Answer] = field(default_factory=list)  # to another payload under its key
    gave_up: int = 0  # clients that never got a final answer


@dataclass(frozen=True)
class Findings:
    """What was found on one side. Everything but the first two should be zero."""

    operations: int
    effects: int
    doubled: int  # charges with more than one effect
    lost: int  # charges that were acknowledged and have none
    wrong: int  # answers that are not the one outcome of their charge
    unsettled: int  # charges of which a client never learned the outcome
    examples: tuple[str, ...] = ()  # the first few of each, for whoever has to find the cause


def judge(histories: Iterable[History], effects: Effects) -> Findings:
    """Compare every client's answers with each other and with the effects of their charge."""
    counts: Counter[str] = Counter()
    examples: list[str] = []

    def note(kind: str, what: str) -> None:
        counts[kind] += 1
        if counts[kind] <= 3:
            examples.append(f"{kind}: {what}")

    for history in histories:
        charge = history.charge
        counts["operations"] += 1
        name = f"{charge.account} {charge.key} ({charge.trouble.value})"
        ids = effects.get((charge.account, charge.label), ())
        if len(ids) > 1:
            note("doubled", f"{name} has the effects {list(ids)}")
        if not ids and any(200 <= answer.status < 300 for answer in history.answers):
            note("lost", f"{name} was acknowledged and has no effect")
        if history.gave_up:
            note("unsettled", f"{history.gave_up} client(s) of {name} never learned its outcome")
        for answer in history.answers:
            if problem := wrong_with(answer, history.answers[0], ids):
                note("wrong", f"{name} was answered {answer.status} {answer.body[:200]!r}: {problem}")
        for answer in history.answers_to_changed:
            if answer.code != "idempotency_key_reused" or answer.status != 422:
                note("wrong", f"{name} with another payload was answered {answer.status} instead of 422")
    return Findings(
        operations=counts["operations"],
        effects=sum(len(ids) for ids in effects.values()),
        doubled=counts["doubled"],
        lost=counts["lost"],
        wrong=counts["wrong"],
        unsettled=counts["unsettled"],
        examples=tuple(examples),
    )


def wrong_with(answer: Answer, first: Answer, ids: Sequence[int]) -> str:
    """Why the answer is not the charge's one outcome, or nothing."""
    if answer.status != 201:
        return "a charge that is sent with its own payload is answered 201"
    if outcome_of(answer) != outcome_of(first):
        return f"another client was answered {first.status} {first.body[:200]!r}"
    try:
        named = json.loads(answer.body)["id"]
    except (ValueError, KeyError, TypeError):
        return "it names no charge"
    return "" if named in ids or not ids else f"it names charge {named}, but the effect is {list(ids)}"


def outcome_of(answer: Answer) -> tuple[object, ...]:
    return answer.status, answer.content_type, answer.location, answer.body


def complaints(
    protected: Findings, control: Findings, seen: Mapping[Seen, int], kills: int, take_overs: int, can_be_outlived: bool
) -> list[str]:
    """Every reason to call the run a failure, in words; none if it passed. ``seen`` is the protected side's.

    ``can_be_outlived``: the database lets another write while a stalled worker's transaction is open.
    """
    found: list[str] = []
    if protected.effects != protected.operations:
        found.append(f"{protected.operations} charges had {protected.effects} effects.")
    if protected.doubled:
        found.append(f"{protected.doubled} charges took effect more than once.")
    if protected.lost:
        found.append(f"{protected.lost} charges were acknowledged and lost.")
    if protected.wrong:
        found.append(f"{protected.wrong} answers were not the one outcome of their charge.")
    if protected.unsettled:
        found.append(f"The clients of {protected.unsettled} charges gave up without an outcome.")
    # A check that never fired is a failure, too: the storm was none.
    if not kills:
        found.append("No worker was killed, so nothing is shown about crashes.")
    if not seen.get(Seen.KILLED_AT_WORK):
        found.append("No worker was killed in the middle of a protected charge.")
    if not take_overs:
        found.append("No claim was taken over from a dead or stalled worker.")
    if can_be_outlived and not seen.get(Seen.OUTLIVED):
        found.append("No stalled worker woke up after its claim had been taken over.")
    if not seen.get(Seen.CUT) or not seen.get(Seen.TIMEOUT):
        found.append("No request was cut, or none timed out.")
    if not seen.get(Seen.REPLAY) or not seen.get(Seen.CONFLICT):
        found.append("No duplicate was answered with a replay, or none met another attempt at work.")
    if not seen.get(Seen.MISMATCH):
        found.append("No changed payload was rejected.")
    if not control.doubled:
        found.append("The unprotected endpoint doubled nothing, so the storm would not have shown a fault.")
    return found
