"""The judgement, without I/O: what the clients were told against what the database holds.

An effect is a charge in the database, or a payout in the provider's ledger; an answer proves nothing but itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .client import Answer
from .payouts import CONTROL, SIDES
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
    parked: tuple[str, ...] = ()  # labels of those whose clients were told that the outcome is unknown
    examples: tuple[str, ...] = ()  # the first few of each, for whoever has to find the cause


def judge(histories: Iterable[History], effects: Effects, *, named_by: str = "id", may_park: bool = False) -> Findings:
    """Compare every client's answers with each other and with the effects of their charge.

    ``named_by`` is the field of an answer that names the effect. ``may_park``: an unknown outcome is an outcome.
    """
    counts: Counter[str] = Counter()
    examples: list[str] = []
    parked: list[str] = []

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
        if history.answers and is_parked(history.answers[0]):
            parked.append(charge.label)
        for answer in history.answers:
            if problem := wrong_with(answer, history.answers[0], ids, named_by, may_park):
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
        parked=tuple(parked),
        examples=tuple(examples),
    )


def wrong_with(answer: Answer, first: Answer, ids: Sequence[int], named_by: str, may_park: bool) -> str:
    """Why the answer is not the charge's one outcome, or nothing."""
    parked = may_park and is_parked(answer)
    if answer.status != 201 and not parked:
        return "a charge that is sent with its own payload is answered 201"
    if outcome_of(answer) != outcome_of(first):
        return f"another client was answered {first.status} {first.body[:200]!r}"
    if parked:
        return ""
    try:
        named = json.loads(answer.body)[named_by]
    except (ValueError, KeyError, TypeError):
        return "it names no charge"
    return "" if named in ids or not ids else f"it names charge {named}, but the effect is {list(ids)}"


def is_parked(answer: Answer) -> bool:
    return answer.code == "idempotency_outcome_unknown"


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


def payout_complaints(
    findings: Mapping[str, Findings],
    rows: Mapping[str, int],
    seen: Mapping[str, Mapping[Seen, int]],
    again: int,
    deduplicated: int,
) -> list[str]:
    """The same for the payouts, by the names of their sides.

    ``rows`` counts our own rows, ``again`` the claims that REEXECUTE has run again, and ``deduplicated`` the calls
    that its provider knew by their key.
    """
    found: list[str] = []
    for side in SIDES:
        of, what = findings[side.name], f"payouts under {side.title}"
        if side.name == CONTROL:
            if not of.doubled:
                found.append("Without protection no payout was doubled, so the faults would not have shown one.")
            continue
        settled = of.operations - len(of.parked)
        if side.may_park:
            if not of.parked:
                found.append("No payout was parked.")
        elif of.parked or of.effects != of.operations:
            found.append(f"{of.operations} {what} were paid {of.effects} times, and {len(of.parked)} were parked.")
        if not settled <= rows[side.name] <= of.operations:  # a parked one may have got as far as its row
            found.append(f"{settled} acknowledged {what} have {rows[side.name]} rows in the database.")
        if of.doubled:
            found.append(f"{of.doubled} {what} were made more than once.")
        if of.lost:
            found.append(f"{of.lost} {what} were acknowledged and not made.")
        if of.wrong:
            found.append(f"{of.wrong} answers were not the one outcome of their {what}.")
        if of.unsettled:
            found.append(f"The clients of {of.unsettled} {what} gave up without an outcome.")
        if not seen[side.name].get(Seen.KILLED_AT_WORK):
            found.append(f"No worker was killed in the middle of {what}.")
        if not seen[side.name].get(Seen.PROVIDER_FAILED):
            found.append(f"The provider failed at none of the {what}.")
    if not again or not deduplicated:
        found.append("No payout was run again, or the provider never met a derived key again.")
    if not seen["reconcile"].get(Seen.RECONCILED):
        found.append("No reconciler found that an abandoned payout had been made.")
    return found
