"""Preconditions of a run: two operations succeed, and the counter shows one effect for each."""

from __future__ import annotations

import time
from dataclasses import replace

from .judging import Trial
from .profiles import Profile
from .target import SHED_PAUSE, SHED_TRIES, HarmError, NotJudgedError, Operation, Target, together
from .wire import Answer


class UnjudgeableError(Exception):
    """Nothing can be judged. The message is a sentence that describes the cause."""


def _succeed(operation: Operation) -> Answer:
    try:
        answer = operation.send()
    except (NotJudgedError, HarmError) as error:
        raise UnjudgeableError(f"{error}.") from error
    if not answer.succeeded:
        raise UnjudgeableError(
            f"The operation answered {answer}, which is not a success. Check --url, --body, --header and --declare."
        )
    return answer


def _read(target: Target) -> list[int]:
    try:
        return target.counted()
    except NotJudgedError as error:
        raise UnjudgeableError(f"Effects can't be counted: {error}.") from error


def _index(readings: list[list[int]]) -> int:
    """The index of the number that counts effects.

    :param readings: two readings before the first operation, and one after each of two operations.
    """
    columns = list(zip(*readings, strict=False))
    found = [i for i, (idle, first, *more) in enumerate(columns) if (first - idle, *more) == (0, first + 1, first + 2)]
    if not found:
        seen = ", ".join(str(reading[0] if len(reading) == 1 else reading) for reading in readings[1:])
        raise UnjudgeableError(
            f"The counter must grow by one with each operation, but before and after two operations it showed {seen}."
        )
    if len({columns[i] for i in found}) > 1:
        raise UnjudgeableError(f"The counter shows several numbers that grow by one: {readings[-1]}.")
    return found[0]


def _do_results_differ(target: Target, profile: Profile) -> bool:
    """Whether two operations have different answers, apart from values that they echo from their requests.

    They run at once, so that a timestamp alone is unlikely to make a difference.
    """
    bodies: set[bytes] = set()
    for _ in range(SHED_TRIES):
        operations = [Operation(target, profile) for _ in range(2)]
        answers, _ = together([(operation, operation.request()) for operation in operations])
        bodies = {
            operation.blank(answer)
            for operation, answer in zip(operations, answers, strict=True)
            if isinstance(answer, Answer) and profile.is_result(answer)
        }
        if not any(operation.shed for operation in operations):
            break
        waits = [answer.retry_after or SHED_PAUSE for answer in answers if isinstance(answer, Answer)]
        time.sleep(min(max(waits), target.patience))  # as the server demands
    return len(bodies) == 2


def prepare(target: Target, profile: Profile) -> Trial:
    """:raises UnjudgeableError: nothing can be judged."""
    readings = [_read(target), _read(target)] if target.is_counted else []
    operations = [Operation(target, profile) for _ in range(2)]
    answers = []
    for operation in operations:
        answers.append(_succeed(operation))
        if target.is_counted:
            readings.append(_read(target))
    trial = Trial(replace(target, count_index=_index(readings)) if readings else target, profile)
    trial.oldest = operations[0]
    for answer in answers:
        trial.leaks.learn(answer)
    trial.results_differ = _do_results_differ(target, profile)
    if not (trial.results_differ or target.is_counted):
        raise UnjudgeableError(
            "Without --count-url or --count-command, each execution must have a different answer, but two were equal."
        )
    if readings:
        trial.began_with = trial.target.effects()
    return trial
