"""How a case is declared and judged, and the audit after each case, which doesn't depend on the case's rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import permutations

from .leaks import Leaks
from .profiles import PROMISE, Level, Profile, Refusal, Rule
from .target import NotJudgedError, Operation, Target
from .wire import WIRE_ERRORS, Answer, Request

#: Header fields that describe the result. Others, such as ``Date``, may differ between responses.
DESCRIBING = ("Content-Type", "Content-Language", "Content-Encoding", "Location", "ETag", "Link")


class Verdict(Enum):
    PASSED = "passed"
    #: The server does not do what it SHOULD do.
    DEVIATES = "deviates"
    FAILED = "failed"
    NOT_JUDGED = "not judged"


class ViolationError(Exception):
    """The server breaks the rule of the case. The message describes how."""


class HarmError(ViolationError):
    """A client is harmed, which is a failure even if the rule of the case is a SHOULD.

    There was a second effect; a success was reported for an operation that didn't run; a result was shown to the wrong
    request; retries never end; or the server failed where it had to refuse.
    """


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
        if (effects := operation.effects()) != expected:
            raise (HarmError if effects > expected else ViolationError)(f"{effects} effects instead of {expected}")

    def require_replay(self, replay: Answer, first: Answer) -> None:
        """Require the same status, the same bytes as body, and the same header fields in ``DESCRIBING``."""
        if replay.status != first.status:
            raise ViolationError(f"the first answer was {first}, and the retry's was {replay}")
        if replay.body != first.body:
            raise ViolationError(f"the retry's body differs: {first} and {replay}")
        for name in DESCRIBING:
            if replay.field(name) != first.field(name):
                raise ViolationError(f"{name} was {first.field(name)!r}, and is {replay.field(name)!r} in the retry")

    def require_refusal(self, answer: Answer, refusal: Refusal) -> str:
        if answer.status != refusal.status:
            is_harm = answer.succeeded or answer.status >= 500
            raise (HarmError if is_harm else ViolationError)(f"expected {refusal.status}, got {answer}")
        if complaint := self.profile.complaint(answer, refusal):
            raise ViolationError(f"{answer}: {complaint}")
        return f"{answer.status}"

    def require_settled(self, operation: Operation) -> Answer:
        """Retry until the operation has a result."""
        return self.require_result(operation.settle())

    def require_result(self, last: Answer | None) -> Answer:
        """Require that the last answer to retries is a result."""
        if last is None or not self.profile.is_result(last):
            raise HarmError(f"retries for {self.target.patience:g} s ended with {last or 'no answer'}")
        return last

    def require_one_effect(self, operation: Operation, settled: Answer, first: Answer | None = None) -> None:
        """Require one effect, and that ``settled`` equals the first answer or, without one, is replayed."""
        self.require_replay(settled if first else operation.send(), first or settled)
        self.require_effects(operation, 1)

    def seconds_of_an_operation(self) -> float:
        """Measure an operation. An operation before it is not measured, because a restart may slow it down."""
        self.operation().first()
        started = time.monotonic()
        self.operation().first()
        return time.monotonic() - started

    def begin(self) -> None:
        """Begin a case."""
        self.operations, self._before = [], None
        self._before = self.target.effects() if self.target.is_counted else None

    def audit(self) -> None:
        """Check, at the end of each case, the promises that don't depend on its rule and verdict.

        :raises HarmError: one is broken.
        """
        sent = [(operation, request) for operation in self.operations for request in operation.answers]
        succeeded = [(operation, request) for operation in self.operations for request in operation.results()]
        if self._before is not None:
            effects = self.target.effects() - self._before
            self.seen_effects += effects
            if effects > len(sent):
                raise HarmError(f"{effects} effects of {len(sent)} requests, not counting retries")
            if effects < len(succeeded):
                raise HarmError(f"{len(succeeded)} requests got a success, and {effects} had an effect")
        for (owner, request), (other, another) in permutations(sent, 2):
            for result in set(owner.results().get(request, [])):
                for answer in other.answers[another]:
                    self._require_no_leak(result, answer, other, another)
        for operation, request in succeeded:
            self.leaks.learn(operation.results()[request][0])

    def _require_no_leak(self, result: Answer, answer: Answer, receiver: Operation, request: Request) -> None:
        """Require that an answer to another request discloses nothing of a result."""
        if not receiver.profile.is_result(answer):
            if shown := self.leaks.shown(result, answer, request):
                raise HarmError(f"a refusal shows {shown} of another request's result: {answer}")
        elif self.results_differ and (answer.body == result.body or self.leaks.is_same_place(result, answer)):
            raise HarmError(f"a request was answered with another one's result: {answer}")


def _verdict(check: Callable[[], object], rule: Rule) -> tuple[Verdict, Rule, str]:
    try:
        return Verdict.PASSED, rule, str(check())
    except NotJudgedError as error:
        return Verdict.NOT_JUDGED, rule, str(error)
    except HarmError as error:
        return Verdict.FAILED, rule if rule.level is Level.MUST else PROMISE, str(error)
    except ViolationError as error:
        return (Verdict.FAILED if rule.level is Level.MUST else Verdict.DEVIATES), rule, str(error)
    except WIRE_ERRORS as error:
        return Verdict.NOT_JUDGED, rule, f"the connection failed: {error!r}"


def judge(case: Case, trial: Trial) -> Result:
    rule = trial.profile.rules.get(case.name, case.rule)
    started = time.monotonic()

    def run() -> str:
        trial.begin()
        return case.judge(trial)

    judged = _verdict(run, rule)
    audited = _verdict(trial.audit, PROMISE)
    if audited[0] is Verdict.NOT_JUDGED:
        trial.began_with = None  # effects of this case may be missing from the count
    if Verdict.FAILED is judged[0] is audited[0]:
        judged = (*judged[:2], f"{judged[2]}; {audited[2]}")
    # Harm found by the audit, or an audit that could not be made, overrides a better verdict of the case.
    weight = [Verdict.PASSED, Verdict.NOT_JUDGED, Verdict.DEVIATES, Verdict.FAILED]
    worst = max(judged, audited, key=lambda found: weight.index(found[0]))
    return Result(case, worst[1], worst[0], worst[2], time.monotonic() - started)
