"""How a case is declared, judged and reported: as text, as JUnit's XML, and as a page that needs no other file."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

from .profiles import Level, Profile, Refusal, Rule
from .target import NotJudgedError, Operation, Target
from .wire import WIRE_ERRORS, Answer

#: What holds whatever the profile: a retry has the intended effect of one request.
PROMISE = Rule(Level.MUST, "RFC 9110, section 9.2.2: several identical requests have the effect of one")
#: Header fields that describe the result. Others may differ from one response to the next, such as ``Date``.
DESCRIBING = ("Content-Type", "Content-Language", "Content-Encoding", "Location", "ETag", "Link")


class Verdict(Enum):
    PASSED = "passed"
    #: The server does not do what it SHOULD do.
    DEVIATES = "deviates"
    FAILED = "failed"
    NOT_JUDGED = "not judged"


class ViolationError(Exception):
    """The server breaks the rule of the case. The message says how."""


class DoubledError(ViolationError):
    """There were more effects than operations, which breaks the promise, however binding the rule of the case is."""


@dataclass(frozen=True)
class Case:
    """One thing that a server has to do."""

    name: str
    proves: str
    #: Unless the profile has one of its own for this case.
    rule: Rule
    #: Returns what was seen if the server keeps the rule.
    judge: Callable[[Trial], str]


@dataclass(frozen=True)
class Result:
    case: Case
    rule: Rule
    verdict: Verdict
    detail: str
    seconds: float


@dataclass(frozen=True)
class Trial:
    """What the cases share: the server, the profile, and the checks that most of them make."""

    target: Target
    profile: Profile

    def operation(self, body: str | None = None, length: int = 36) -> Operation:
        return Operation(self.target, self.profile, body, length)

    def counted(self) -> Operation:
        """An operation whose effects are counted from now on."""
        operation = self.operation()
        operation.start_counting()
        return operation

    def option(self, name: str) -> str:
        """An optional part of the target, such as ``other_body``."""
        value: str | None = getattr(self.target, name)
        if value is None:
            raise NotJudgedError(f"this case needs --{name.replace('_', '-')}")
        return value

    def require_effects(self, operation: Operation, expected: int) -> None:
        if (effects := operation.effects()) != expected:
            raise (DoubledError if effects > expected else ViolationError)(f"{effects} effects instead of {expected}")

    def require_replay(self, replay: Answer, first: Answer) -> None:
        """Both answers have the same status, body, byte for byte, and header fields that describe the result."""
        if replay.status != first.status:
            raise ViolationError(f"the first answer was {first}, and the retry's was {replay}")
        if replay.body != first.body:
            raise ViolationError(f"the retry's body differs: {first} and {replay}")
        for name in DESCRIBING:
            if replay.field(name) != first.field(name):
                raise ViolationError(f"{name} was {first.field(name)!r}, and is {replay.field(name)!r} in the retry")

    def require_refusal(self, answer: Answer, refusal: Refusal) -> str:
        if answer.status != refusal.status:
            raise ViolationError(f"expected {refusal.status}, got {answer}")
        if complaint := self.profile.complaint(answer, refusal):
            raise ViolationError(f"{answer}: {complaint}")
        return f"{answer.status}"

    def require_settled(self, operation: Operation) -> Answer:
        """Retry until the operation has a result."""
        answer = operation.settle()
        if answer is None or not answer.succeeded:
            raise ViolationError(f"retries for {self.target.patience:g} s ended with {answer or 'no answer'}")
        return answer

    def require_one_effect(self, operation: Operation, first: Answer | None = None) -> None:
        """Retries end with the first answer, or with one that is replayed if there was none, and have one effect."""
        settled = self.require_settled(operation)
        self.require_replay(settled if first else operation.send(), first or settled)
        self.require_effects(operation, 1)


def judge(case: Case, trial: Trial) -> Result:
    rule = trial.profile.rules.get(case.name, case.rule)
    started = time.monotonic()
    try:
        verdict, detail = Verdict.PASSED, case.judge(trial)
    except NotJudgedError as error:
        verdict, detail = Verdict.NOT_JUDGED, str(error)
    except ViolationError as error:
        is_binding = rule.level is Level.MUST or isinstance(error, DoubledError)
        verdict = Verdict.FAILED if is_binding else Verdict.DEVIATES
        detail = str(error)
    except WIRE_ERRORS as error:
        verdict, detail = Verdict.NOT_JUDGED, f"the connection failed: {error!r}"
    return Result(case, rule, verdict, detail, time.monotonic() - started)


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: .4rem .6rem; text-align: left; vertical-align: top; }
td:first-child, td:nth-child(2) { white-space: nowrap; }
small { color: #555; display: block; }
.passed { color: #10672c; } .failed { color: #b3141b; font-weight: bold; } .deviates { color: #8a5300; }
"""


def summary(results: Sequence[Result]) -> str:
    """The closing line. A run that judged nothing says so."""
    counts = Counter(result.verdict for result in results)
    checked = len(results) - counts[Verdict.NOT_JUDGED]
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict]
    return f"checked {checked}: {', '.join(parts)}"


def as_text(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        lines.append(f"{result.verdict.value:10}  {result.case.name:24}  {result.detail}")
        if result.verdict in (Verdict.FAILED, Verdict.DEVIATES):
            lines.append(f"{'':10}  {'':24}  {result.rule.level.value}: {result.rule.source}")
    return "\n".join([*lines, "", summary(results), ""])


def as_junit(results: Sequence[Result], profile: Profile) -> str:
    """Deviations are passes with a remark, because no rule forbids them."""
    counts = Counter(result.verdict for result in results)
    numbers = {
        "tests": len(results),
        "failures": counts[Verdict.FAILED],
        "skipped": counts[Verdict.NOT_JUDGED],
    }
    suite = ET.Element(
        "testsuite", {"name": f"conformance.{profile.name}", **{name: str(value) for name, value in numbers.items()}}
    )
    tags = {Verdict.FAILED: "failure", Verdict.NOT_JUDGED: "skipped"}
    for result in results:
        attributes = {"classname": profile.name, "name": result.case.name, "time": f"{result.seconds:.3f}"}
        element = ET.SubElement(suite, "testcase", attributes)
        if (tag := tags.get(result.verdict)) is not None:
            ET.SubElement(element, tag, {"message": _printable(result.detail)}).text = result.rule.source
        else:
            ET.SubElement(element, "system-out").text = _printable(f"{result.verdict.value}: {result.detail}")
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def as_html(results: Sequence[Result], profile: Profile, url: str) -> str:
    rows = "".join(
        f"<tr><td>{escape(result.case.name)}</td><td class='{result.verdict.value}'>{result.verdict.value}</td>"
        f"<td>{escape(result.detail)}<small>{escape(result.case.proves)}</small></td>"
        f"<td>{result.rule.level.value}<small>{escape(result.rule.source)}</small></td></tr>\n"
        for result in results
    )
    title, document = f"Idempotency-Key conformance: {escape(url)}", escape(profile.document)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
        f"</head><body><h1>{title}</h1>\n<p>Profile {profile.name}, after <a href='{document}'>{document}</a>. "
        f"{summary(results)}.</p>\n<table><thead><tr><th>Case</th><th>Verdict</th><th>Seen</th><th>Rule</th></tr>"
        f"</thead><tbody>\n{rows}</tbody></table></body></html>\n"
    )


def _printable(text: str) -> str:
    """XML has no place for control characters."""
    return "".join(character if character.isprintable() else " " for character in text)
