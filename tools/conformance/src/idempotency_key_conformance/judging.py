"""How a case is declared and judged, and the audit after each case, which doesn't depend on the case's rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from .leaks import Leaks
from .profiles import PROMISE, Level, Profile, Refusal, Rule
from .target import (
    ANOTHERS_RESULT,
    BROKEN,
    NO_EFFECT,
    NO_END,
    SECOND_EFFECT,
    SHED_PAUSE,
    HarmError,
    NotJudgedError,
    Operation,
    Target,
    ViolationError,
)
from .wire import WIRE_ERRORS, Answer, Request

#: Header fields that describe the result. Others, such as ``Date``, may differ between responses.
DESCRIBING = ("Content-Type", "Content-Language", "Content-Encoding", "Location", "ETag", "Link")


#: The cause of a replay that is not equal to the first answer.
DIFFERS = "a retry with a different answer"


class Verdict(Enum):
    PASSED = "passed"
    #: The server does not do what it SHOULD do.
    DEVIATES = "deviates"
    FAILED = "failed"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Case:
    """One requirement for a server."""

    name: str
    proves: str
    #: The default, which the profile may override.
    rule: Rule
    #: Returns a summary of the observations if the server keeps the rule.
    judge: Callable[[Trial], str]


@dataclass(frozen=True)
class Result:
    case: Case
    rule: Rule
    verdict: Verdict
    detail: str
    seconds: float
    #: What this case has in common with others: a cause of failures, or a reason not to judge.
    cause: str = ""


class Trial:
    """State and checks that the cases share: the server and its profile."""

    def __init__(self, target: Target, profile: Profile) -> None:
        self.target = target
        self.profile = profile
        #: Whether each operation is known to have a different answer, so that an equal answer is a leak.
        self.results_differ: bool = False
        self.leaks: Leaks = Leaks()
        #: The operations of the current case, and the number of effects before it.
        self.operations: list[Operation] = []
        self._before: int | None = None
        #: The number of effects before the first case, and the number counted in the cases.
        self.began_with: int | None = None
        self.seen_effects: int = 0
        #: How many requests were shed so far.
        self.shed: int = 0
        #: The first operation of the run.
        self.oldest: Operation | None = None

    def operation(self, body: str | None = None, *, key: str | None = None, unique: str = "") -> Operation:
        """As ``Operation``."""
        operation = Operation(self.target, self.profile, body, key=key, unique=unique)
        self.operations.append(operation)
        return operation

    def counted(self, body: str | None = None) -> Operation:
        """A new operation whose effects are counted from now on."""
        operation = self.operation(body)
        operation.start_counting()
        return operation

    def option(self, name: str) -> str:
        """An optional attribute of the target, such as ``other_body``.

        :raises NotJudgedError: it was not given.
        """
        value: str | None = getattr(self.target, name)
        if value is None:
            raise NotJudgedError(f"this case needs --{name.replace('_', '-')}")
        return value

    def require_counter(self) -> None:
        if not self.target.is_counted:
            raise NotJudgedError("an effect whose answer is lost shows only in a counter: --count-url, --count-command")

    def require_effects(self, operation: Operation, expected: int) -> None:
        if (effects := operation.effects()) > expected:
            raise HarmError(f"{effects} effects instead of {expected}", SECOND_EFFECT)
        if effects < expected:
            raise ViolationError(f"{effects} effects instead of {expected}", NO_EFFECT)

    def require_replay(self, replay: Answer, first: Answer) -> None:
        """Require the same status, the same body or equal JSON, and the same header fields in ``DESCRIBING``."""
        if replay.status != first.status:
            raise ViolationError(f"the first answer was {first}, and the retry's was {replay}", DIFFERS)
        if replay.content != first.content:
            raise ViolationError(f"the retry's body differs: {first} and {replay}", DIFFERS)
        for name in DESCRIBING:
            if replay.field(name) != first.field(name):
                seen = f"{name} was {first.field(name)!r}, and is {replay.field(name)!r} in the retry"
                raise ViolationError(seen, DIFFERS)

    def require_refusal(self, answer: Answer, refusal: Refusal) -> str:
        if answer.status != refusal.status:
            if answer.succeeded or answer.status >= 500:
                cause = BROKEN if answer.status >= 500 else None
                raise HarmError(f"expected {refusal.status}, got {answer}", cause)
            raise ViolationError(
                f"expected {refusal.status}, got {answer}", f"{answer.status} instead of {refusal.status}"
            )
        if complaint := self.profile.complaint(answer, refusal):
            raise ViolationError(f"{answer}: {complaint}", complaint)
        return f"{answer.status}"

    def require_settled(self, operation: Operation) -> Answer:
        """Retry until the operation has a result."""
        return self.require_result(operation.settle())

    def require_result(self, last: Answer | None) -> Answer:
        """Require that the last answer to retries is a result."""
        if last is None or not self.profile.is_result(last):
            raise HarmError(f"retries for {self.target.patience:g} s ended with {last or 'no answer'}", NO_END)
        return last

    def require_one_effect(self, operation: Operation, settled: Answer, first: Answer | None = None) -> None:
        """Require one effect, and that ``settled`` equals the first answer or, without one, is replayed."""
        self.require_replay(settled if first else operation.send(), first or settled)
        self.require_effects(operation, 1)

    def seconds_of_an_operation(self) -> float:
        """Measure an operation. An operation before it is not measured, because a restart may slow it down."""
        self.operation().first()
        operation = self.operation()
        operation.first()
        return operation.took

    def begin(self) -> None:
        """Begin a case."""
        self.operations, self._before = [], None
        self._before = self.target.effects() if self.target.is_counted else None

    def audit(self) -> None:
        """Check, at the end of each case, the promises that don't depend on its rule and verdict.

        :raises HarmError: one is broken.
        """
        operations = [each for operation in self.operations for each in (operation, *operation.controls)]
        self.shed += sum(operation.shed for operation in operations)
        sent = [(operation, request) for operation in operations for request in operation.answers]
        if any(operation.may_still_run for operation in operations):
            time.sleep(SHED_PAUSE)  # otherwise the effect would be counted in the next case
        results = {
            (operation, request): found for operation in operations for request, found in operation.results().items()
        }
        if self._before is not None:
            effects = self.target.effects() - self._before
            self.seen_effects += effects
            allowed = sum(operation.may_have_run(request) for operation, request in sent)
            if effects > allowed:
                refused = f" and {len(sent) - allowed} refused ones" if allowed < len(sent) else ""
                raise HarmError(
                    f"{effects} effects of {allowed} requests{refused}, not counting retries", SECOND_EFFECT
                )
            if effects < len(results):
                raise HarmError(f"{len(results)} requests got a success, and {effects} had an effect", NO_EFFECT)
        for ((owner, request), [result, *_]), (other, another) in product(results.items(), sent):
            if (owner, request) != (other, another):
                for answer in set(other.answers[another]):
                    self._require_no_leak(result, answer, other, another)
        for found in results.values():
            self.leaks.learn(found[0])

    def _require_no_leak(self, result: Answer, answer: Answer, receiver: Operation, request: Request) -> None:
        """Require that an answer to another request discloses nothing of a result."""
        if not receiver.profile.is_result(answer):
            if shown := self.leaks.shown(result, answer, request):
                raise HarmError(f"a refusal shows {shown} of another request's result: {answer}", ANOTHERS_RESULT)
            return
        is_same = answer.content == result.content != b"" or self.leaks.is_same_place(result, answer)
        if self.results_differ and is_same:
            raise HarmError(f"a request was answered with another one's result: {answer}", ANOTHERS_RESULT)


@dataclass(frozen=True)
class _Finding:
    verdict: Verdict
    rule: Rule
    detail: str
    cause: str = ""


def _found(check: Callable[[], object], rule: Rule, profile: Profile) -> _Finding:
    try:
        return _Finding(Verdict.PASSED, rule, str(check()))
    except NotJudgedError as error:
        return _Finding(Verdict.NOT_JUDGED, rule, str(error), str(error))
    except HarmError as error:
        return _Finding(Verdict.FAILED, rule if rule.level is Level.MUST else PROMISE, str(error), error.cause)
    except ViolationError as error:
        if error.cause == DIFFERS:  # whichever case finds it
            rule = profile.rules.get("replay-is-equal", PROMISE)
        verdict = Verdict.FAILED if rule.level is Level.MUST else Verdict.DEVIATES
        return _Finding(verdict, rule, str(error), error.cause)
    except WIRE_ERRORS as error:
        return _Finding(Verdict.NOT_JUDGED, rule, f"the connection failed: {error!r}", "the connection failed")


def judge(case: Case, trial: Trial) -> Result:
    rule = trial.profile.rules.get(case.name, case.rule)
    started = time.monotonic()

    def run() -> str:
        trial.begin()
        return case.judge(trial)

    judged = _found(run, rule, trial.profile)
    audited = _found(trial.audit, PROMISE, trial.profile)
    if audited.verdict is Verdict.NOT_JUDGED:
        trial.began_with = None  # effects of this case may be missing from the count
    if Verdict.FAILED is judged.verdict is audited.verdict:
        judged = replace(judged, detail=f"{judged.detail}; {audited.detail}", cause=audited.cause)
    # Harm found by the audit, or an audit that could not be made, overrides a better verdict of the case.
    weight = [Verdict.PASSED, Verdict.NOT_JUDGED, Verdict.DEVIATES, Verdict.FAILED]
    worst = max(judged, audited, key=lambda found: weight.index(found.verdict))
    return Result(case, worst.rule, worst.verdict, worst.detail, time.monotonic() - started, worst.cause)
