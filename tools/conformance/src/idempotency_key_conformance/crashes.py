"""Cases that kill or freeze the server by the operator's commands, and the case that waits for expiry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

from .cases import TRIES
from .judging import Case, Trial
from .profiles import PROMISE, SUITE, Level, Rule
from .target import HarmError, NotJudgedError, Operation
from .wire import WIRE_ERRORS, Answer, Connection, exchange

#: An upper bound for the difference between two clocks, in seconds.
MARGIN = 0.5
#: A record must still exist after this fraction of the retention, or ``MARGIN`` before its end if that is later.
ALMOST = 0.75
#: Seconds between two readings of the counter, until it shows the effect after which the server is killed.
POLL = 0.005
#: When the server is killed, as fractions of the operation's duration.
MOMENTS = {"early": 0.1, "while-it-runs": 1 / 3, "late": 0.8}
_RETENTION = Rule(Level.MUST, f"{SUITE}: the retention is as documented")


class _MissedError(NotJudgedError):
    """The request was answered before the server was killed or frozen."""


@contextmanager
def _running(trial: Trial, operation: Operation, part: float) -> Iterator[Connection]:
    """Send the request, and wait for a fraction of the time that another operation took.

    :raises _MissedError: it was answered before that.
    """
    takes = trial.seconds_of_an_operation()
    operation.start_counting()
    with operation.connect() as connection:
        connection.send_all()
        if connection.is_answered(within=part * takes):
            operation.note(connection.attempt())
            raise _MissedError("it was answered before it could be struck")
        yield connection


@contextmanager
def _killed_server(trial: Trial) -> Iterator[None]:
    trial.target.strike("kill")
    try:
        yield
    finally:
        trial.target.strike("restart")


def _results(trial: Trial, *answers: Answer | Exception | None) -> list[Answer]:
    """The answers that report that the operation ran."""
    return [answer for answer in answers if isinstance(answer, Answer) and trial.profile.is_result(answer)]


def _recovered(trial: Trial, operation: Operation, results: list[Answer]) -> str:
    """Check that retries after a crash end with the result that the client already has, or with one that is replayed.

    They may also end with the ``unknown`` status, if the server documents it.
    """
    settled = operation.settle()
    if settled is not None and trial.profile.is_unknown(settled) and not results:
        return f"{operation.effects()} effects, and the last answer was {settled}"
    trial.require_one_effect(operation, trial.require_result(settled), results[0] if results else None)
    for answer in results[1:]:
        trial.require_replay(answer, results[0])
    return f"1 effect, {'replayed' if results else 'after a retry'}"


def _restarted(trial: Trial) -> str:
    trial.target.require_commands("kill", "restart")
    operation = trial.counted()
    first = operation.first()
    request = operation.request()
    with _killed_server(trial):
        operation.note_sent(request)
        try:
            answer = exchange(request, trial.target.timeout)
        except WIRE_ERRORS:
            pass  # it is down
        else:
            operation.note(answer, request)
            if answer.status < 500:
                raise NotJudgedError(f"the server still answers after --kill: {answer}")
    return _recovered(trial, operation, [first])


def _killed(part: float, trial: Trial) -> str:
    trial.require_counter()
    trial.target.require_commands("kill", "restart")
    for _ in range(TRIES):
        operation = trial.operation()
        try:
            with _running(trial, operation, part) as connection, _killed_server(trial):
                answer = connection.attempt()
        except _MissedError:
            continue
        operation.note(answer)
        results = _results(trial, answer)
        seen = _recovered(trial, operation, results)
        if not results:
            return seen
    raise NotJudgedError(f"{TRIES} times, the operation was answered before the kill struck")


def _killed_after_the_effect(trial: Trial) -> str:
    trial.require_counter()
    trial.target.require_commands("kill", "restart")
    for _ in range(TRIES):
        operation = trial.counted()
        with operation.connect() as connection:
            connection.send_all()
            any(connection.is_answered(within=POLL) or operation.effects() for _ in count())  # wait for either
            with _killed_server(trial):
                answer = connection.attempt()
        operation.note(answer)
        results = _results(trial, answer)
        seen = _recovered(trial, operation, results)
        if not results:
            return seen
    raise NotJudgedError(f"{TRIES} times, the operation was answered before the kill struck")


def _frozen(trial: Trial) -> str:
    trial.require_counter()
    trial.target.require_commands("freeze", "thaw")
    operation = trial.operation()
    with _running(trial, operation, 1 / 3) as connection:
        trial.target.strike("freeze")
        try:
            retried = operation.settle()
            if connection.is_answered():
                raise NotJudgedError("the frozen request was answered: the freeze came too late")
        finally:
            trial.target.strike("thaw")
        late = connection.attempt()
    operation.note(late)
    return _recovered(trial, operation, _results(trial, retried, late))


def _expiry(trial: Trial) -> str:
    if (ttl := trial.target.ttl) is None:
        raise NotJudgedError("it takes as long as the retention; set --ttl SECONDS")
    almost = max(ttl * ALMOST, ttl - MARGIN)
    kept, expired = trial.operation(), trial.operation()
    sent = time.monotonic()
    first = kept.first()
    expired.first()
    answered = time.monotonic()
    if answered > sent + almost:
        raise NotJudgedError("the retention is shorter than the operation takes")
    # The clock of another server can't be moved from here.
    time.sleep(sent + almost - answered)  # nothing reports when the server's record expires
    trial.require_replay(kept.send(), first)
    time.sleep(max(0.0, answered + ttl + MARGIN - time.monotonic()))  # as above
    new = trial.operation(key=expired.key, unique=expired.unique)
    answer = new.send()
    if not trial.profile.is_result(answer):
        raise HarmError(f"after the retention, the key got {answer}")
    return f"kept for {almost:g} s, and new after {ttl:g} s"


def crash_cases() -> list[Case]:
    """The cases of this module. A case without its command is reported as not judged."""
    doubles_nothing = "A crash repeats no effect and blocks no retry."
    return [
        Case("expiry", "A key is kept for its retention, and is new afterwards.", _RETENTION, _expiry),
        Case("restarted", "A result survives a crash once a client has it.", PROMISE, _restarted),
        *(
            Case(f"killed-{moment}", doubles_nothing, PROMISE, partial(_killed, part))
            for moment, part in MOMENTS.items()
        ),
        Case("killed-after-the-effect", doubles_nothing, PROMISE, _killed_after_the_effect),
        Case("frozen-while-it-runs", "A process that resumes late repeats no effect.", PROMISE, _frozen),
    ]
