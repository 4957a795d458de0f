"""The judgement, without I/O: what the clients were told against what the database holds.

An effect is a charge in the database, or a payout in the provider's ledger; an answer proves nothing but itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .client import Answer
from .orders import DIRECT, MESSAGES, OUTBOX, Kill, Order
from .payouts import CONTROL, SIDES
from .plan import Charge
from .tally import Seen

#: (account, label) → the ids of the rows that the charge of that label left behind
Effects = Mapping[tuple[str, str], Sequence[int]]

#: (label of the order, message) → how often the message took effect
HopEffects = Mapping[tuple[str, str], int]


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
    if not seen.get(Seen.KEY_REUSED):
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


@dataclass(frozen=True)
class HopFindings:
    """What was found of the orders of one side, and of the messages that they led to."""

    accepted: int
    declined: int
    expected: int  # messages of accepted orders: so many effects there should be
    effects: int  # of accepted orders
    doubled: int  # messages with more than one effect
    lost: int  # messages of acknowledged orders without an effect
    of_declined: int  # effects of orders that were rolled back
    wrong: int  # answers that are not the one outcome of their order, and rows that don't fit it
    unsettled: int  # orders of which a client never learned the outcome
    examples: tuple[str, ...] = ()


def judge_orders(histories: Sequence[History], charges: Effects, effects: HopEffects) -> HopFindings:
    """Compare what the clients of orders were told with the charges, and those with the effects of the messages."""
    orders = [history.charge for history in histories]
    assert all(isinstance(order, Order) for order in orders)
    declined = {order.label for order in orders if isinstance(order, Order) and order.declined}
    accepted = [history for history in histories if history.charge.label not in declined]
    answers = judge(accepted, {key: ids for key, ids in charges.items() if key[1] not in declined})
    refusals = [history for history in histories if history.charge.label in declined]
    examples = list(answers.examples)
    wrong = answers.wrong + answers.doubled + answers.lost
    for history in refusals:
        told = {outcome_of(answer) for answer in history.answers}
        charged = charges.get((history.charge.account, history.charge.label), ())
        if charged or len(told) > 1 or any(answer.status != 402 for answer in history.answers):
            wrong += 1
            examples.append(f"declined: {history.charge.label} was answered {told} and has the charges {charged}")
    expected = [(history.charge.label, message) for history in accepted for message in MESSAGES]
    doubled = [key for key in expected if effects.get(key, 0) > 1]
    acknowledged = {history.charge.label for history in accepted if history.answers}
    lost = [key for key in expected if not effects.get(key, 0) and key[0] in acknowledged]
    examples += [f"doubled: {message} of {label}" for label, message in doubled[:3]]
    examples += [f"lost: {message} of {label}" for label, message in lost[:3]]
    return HopFindings(
        accepted=len(accepted),
        declined=len(refusals),
        expected=len(expected),
        effects=sum(count for (label, _), count in effects.items() if label not in declined),
        doubled=len(doubled),
        lost=len(lost),
        of_declined=sum(count for (label, _), count in effects.items() if label in declined),
        wrong=wrong,
        unsettled=answers.unsettled + sum(1 for history in refusals if history.gave_up),
        examples=tuple(examples),
    )


def hop_complaints(
    findings: Mapping[str, HopFindings], kills: Mapping[Kill, int], seen: Mapping[Seen, int], replays: int
) -> list[str]:
    """The same for the hop. ``kills`` counts what was killed behind the server, ``seen`` is the outbox's side's."""
    found: list[str] = []
    hop, control = findings[OUTBOX.name], findings[DIRECT.name]
    if hop.effects != hop.expected:
        found.append(f"{hop.expected} messages had {hop.effects} effects.")
    if hop.doubled:
        found.append(f"{hop.doubled} messages took effect more than once.")
    if hop.lost:
        found.append(f"{hop.lost} messages of acknowledged orders were lost.")
    if hop.of_declined:
        found.append(f"Orders that were rolled back had {hop.of_declined} effects.")
    if hop.wrong:
        found.append(f"{hop.wrong} orders were not answered with their one outcome.")
    if hop.unsettled:
        found.append(f"The clients of {hop.unsettled} orders gave up without an outcome.")
    found += [f"No {kill.value} was killed on the hop." for kill in Kill if not kills.get(kill)]
    if not seen.get(Seen.KILLED_AT_WORK):
        found.append("No worker of the server was killed in the middle of an order.")
    if not replays:
        found.append("No message that came again was answered from its record.")
    if not control.doubled and not control.lost:
        found.append("The plain tasks doubled and lost nothing, so the faults would not have shown it.")
    if not control.of_declined:
        found.append("The plain tasks published nothing of an order that was rolled back.")
    return found
