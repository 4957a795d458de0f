"""Compares the clients' responses with the effects, without I/O.

Each row of the table declares the condition for its figure at the protected endpoint and at its unprotected twin. A run
in which a kind of trouble never occurred also fails, because it would prove nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from httpx import Response

from testproject.harness.effects import Effects, judge_effects

from .client import History, code_of

LISTED = 3  # examples of each kind
CHARGES, PAYMENTS, ORDERS = "charges", "payments", "orders"


@dataclass(frozen=True)
class Row:
    """A row of the table, with the condition for its figure at the protected and at the unprotected endpoint."""

    label: str
    figure: str
    must: str = ""
    unprotected: str = ""
    storms: tuple[str, ...] = (CHARGES, PAYMENTS, ORDERS)


HOLDS: dict[str, Callable[[int, int], bool]] = {
    "": lambda value, expected: True,
    "0": lambda value, expected: value == 0,
    "more than 0": lambda value, expected: value > 0,
    "one for each": lambda value, expected: value == expected,
}
ROWS = (
    Row("expected effects", "expected"),
    Row("effects, counted in the database", "effects", "one for each"),
    Row("more than one effect", "doubled", "0", "more than 0"),
    Row("charges in the provider's ledger", "charged", "one for each", "one for each", (PAYMENTS,)),
    Row("acknowledged but lost", "lost", "0"),
    Row("effects of declined orders", "ghosts", "0", "more than 0", (ORDERS,)),
    Row("wrong answers", "wrong", "0"),
    Row("outcome never learned", "unsettled", "0"),
    Row("HTTP requests sent", "requests"),
    Row("connections that the client cut", "cut", "more than 0"),
    Row("connections that a killed worker cut", "broken"),
    Row("replays of the recorded outcome", "replay", "more than 0"),
    Row("conflicts, 409: another attempt in progress", "conflict"),
    Row("server errors, 5xx", "error"),
    Row("changed payloads rejected, 422", "key_reused", "more than 0", storms=(CHARGES, PAYMENTS)),
    Row("claims taken over from dead workers", "take_overs", "more than 0", storms=(CHARGES, PAYMENTS)),
    Row("messages sent again for a killed broker", "resent", storms=(ORDERS,)),
    Row("SIGKILL: the server's workers, of both sides", "kills", "more than 0"),
    Row("SIGKILL: relays", "relay", "more than 0", storms=(ORDERS,)),
    Row("SIGKILL: Celery workers, of both sides", "worker", "more than 0", storms=(ORDERS,)),
    Row("SIGKILL: brokers, of both sides", "redis", "more than 0", storms=(ORDERS,)),
)


@dataclass
class Findings:
    """The findings at one endpoint: figures by name, and the first few mistakes."""

    figures: Counter[str]
    examples: list[str] = field(default_factory=list)


def judge(
    histories: Sequence[History], charges: Mapping[str, Sequence[int]], receipts: Mapping[str, int] | None = None
) -> Findings:
    """Compare the responses of each charge's clients with each other and with its effects.

    :param charges: the ids of each charge's rows, by label.
    :param receipts: how often each order's message took effect, by label. If given, receipts count as the effects, and
        mistakes in the orders' charges count as wrong answers.
    """
    wrong = [
        f"wrong: {history.charge.label} ({history.charge.trouble}) {problem}"
        for history in histories
        for problem in wrong_answers(history, charges.get(history.charge.label, ()))
    ]
    found = effects_of(histories, {label: len(ids) for label, ids in charges.items()})
    if receipts is not None:
        wrong += [f"wrong charge, {example}" for example in found.examples]
        found = effects_of(histories, receipts)
    unsettled = [f"never learned: {history.charge.label}" for history in histories if history.gave_up]
    figures = Counter(
        expected=found.expected,
        effects=found.count,
        doubled=len(found.doubled),
        lost=len(found.lost),
        ghosts=len(found.ghosts),
        wrong=len(wrong),
        unsettled=len(unsettled),
    )
    return Findings(figures, [*found.examples, *wrong[:LISTED], *unsettled[:LISTED]])


def effects_of(histories: Sequence[History], found: Mapping[str, int]) -> Effects:
    accepted = {one.charge.label: one.answers for one in histories if not one.charge.declined}
    acknowledged = [label for label, answers in accepted.items() if any(answer.is_success for answer in answers)]
    return judge_effects(found, accepted, acknowledged)


def wrong_answers(history: History, ids: Sequence[int]) -> Iterator[str]:
    """Every response that differs from the charge's outcome, with the reason."""
    for answer in history.answers:
        if reason := wrong_with(history, answer, ids):
            yield f"was answered {answer.status_code} {answer.text[:200]!r}: {reason}"
    for answer in history.answers_to_changed:
        if (answer.status_code, code_of(answer)) != (422, "idempotency_key_reused"):
            yield f"with another payload was answered {answer.status_code} instead of 422"


def wrong_with(history: History, answer: Response, ids: Sequence[int]) -> str:
    """Why the response differs from the charge's outcome, or ""."""
    first, due = history.answers[0], 402 if history.charge.declined else 201
    if answer.status_code != due:
        return f"the status must be {due}"
    same = ("Content-Type", "Location")
    if answer.content != first.content or any(answer.headers.get(name) != first.headers.get(name) for name in same):
        return f"another client got {first.status_code} {first.text[:200]!r}"
    if history.charge.declined:
        return ""
    try:
        named = answer.json()["id"]
    except (ValueError, KeyError, TypeError):
        return "the response names no charge"
    return "" if named in ids or not ids else f"the response names charge {named}, but the effect is {list(ids)}"


def complaints(rows: Sequence[Row], protected: Findings, unprotected: Findings) -> list[str]:
    """The conditions that the storm violates."""
    return [
        f"{side}: {row.label}: {findings.figures[row.figure]:,}; must be {must}."
        for row in rows
        for side, findings, must in (("protected", protected, row.must), ("unprotected", unprotected, row.unprotected))
        if not HOLDS[must](findings.figures[row.figure], findings.figures["expected"])
    ]
