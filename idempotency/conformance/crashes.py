"""The cases that strike the server, by commands of the person who runs the suite, and the one that waits for expiry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from .judging import PROMISE, Case, Trial, ViolationError
from .target import NotJudgedError, Operation
from .wire import Answer, Connection

#: More than the difference between two clocks, in seconds.
MARGIN = 0.5


@contextmanager
def _running(operation: Operation) -> Iterator[Connection]:
    """Send the request, and wait for a third of the time that another operation took.

    :raises NotJudgedError: it was answered too soon, so that nothing can strike it while it runs.
    """
    other = Operation(operation.target, operation.profile)
    started = time.monotonic()
    other.first()
    third = (time.monotonic() - started) / 3
    operation.start_counting()
    with operation.connect() as connection:
        connection.send_all()
        if connection.is_answered(within=third):
            raise NotJudgedError("it was answered before it could be struck")
        yield connection


def _require_at_most_one(operation: Operation, answer: Answer | None) -> str:
    effects = operation.effects()
    if effects > 1 or (effects == 0 and answer is not None and answer.succeeded):
        raise ViolationError(f"{effects} effects, and the client was told {answer}")
    return f"{effects} effects, and the client was told {answer or 'nothing'}"


def _restarted(trial: Trial) -> str:
    operation = trial.counted()
    first = operation.first()
    trial.target.strike("kill")
    trial.target.strike("restart")
    trial.require_one_effect(operation, first)
    return "1 effect, replayed"


def _killed(trial: Trial) -> str:
    operation = trial.operation()
    with _running(operation) as connection:
        trial.target.strike("kill")
        if isinstance(answer := connection.attempt(), Answer):
            raise NotJudgedError(f"the kill came too late: {answer}")
    trial.target.strike("restart")
    return _require_at_most_one(operation, operation.settle())


def _frozen(trial: Trial) -> str:
    operation = trial.operation()
    with _running(operation) as connection:
        trial.target.strike("freeze")
        try:
            retried = operation.settle()
            if connection.is_answered():
                raise NotJudgedError("the frozen request was answered: the freeze came too late")
        finally:
            trial.target.strike("thaw")
        late = connection.attempt()
    last = operation.settle()
    seen = _require_at_most_one(operation, last)
    results = [answer for answer in (retried, late, last) if isinstance(answer, Answer) and answer.succeeded]
    for result in results[1:]:
        trial.require_replay(result, results[0])
    return seen


def _expiry(trial: Trial) -> str:
    if trial.target.ttl is None:
        raise NotJudgedError("it takes as long as the retention; --ttl SECONDS says how long that is")
    operation = trial.counted()
    first = operation.first()
    time.sleep(trial.target.ttl + MARGIN)  # the clock of another server can't be moved from here
    answer = operation.send()
    if not answer.succeeded:
        raise ViolationError(f"after its retention, the key got {answer}")
    trial.require_effects(operation, 2)
    return f"2 effects; {first.status}, and then {answer.status}"


def crash_cases() -> list[Case]:
    """The cases of this module. Each is reported, also if it lacks its command."""
    return [
        Case("expiry", "After its retention, a key is that of a new request.", PROMISE, _expiry),
        Case("restarted", "What a client was told survives a crash.", PROMISE, _restarted),
        Case("killed-while-it-runs", "A crash doubles nothing.", PROMISE, _killed),
        Case("frozen-while-it-runs", "A process that comes back late doubles nothing.", PROMISE, _frozen),
    ]
