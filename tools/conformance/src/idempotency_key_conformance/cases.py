"""Cases in which a client repeats its request, after the answer or while the first request runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from .judging import DIFFERS, Case, Trial
from .profiles import PROMISE, SUITE, Expected, Level, Rule
from .target import (
    BROKEN,
    BUSY,
    NO_END,
    SHED,
    SHED_PAUSE,
    HarmError,
    NotJudgedError,
    Operation,
    ViolationError,
    together,
)
from .wire import Answer

#: The longest acceptable Retry-After for a duplicate of a running request, in seconds.
LONGEST_WAIT = 600
_RETRY_AFTER = Rule(Level.SHOULD, f"{SUITE}: a refusal states when to retry, within {LONGEST_WAIT} s")
_RECORDED = Rule(Level.MUST, f"{SUITE}: retries end with a result")
#: When a duplicate of a running request is sent, as fractions of the operation's duration.
LATE = (0.25, 0.5, 0.75, 0.9)
#: For how long a retry's late effect is waited for, in seconds, before the next case is blamed for it.
LINGER = 1.0
#: How often a case is tried that needs requests to meet.
TRIES = 3
#: How many keys are used between a request and its retry, how many of them at once, and how many in the case ``load``.
BETWEEN, BATCH, LOAD = 100, 10, 50


def _sequential(trial: Trial) -> str:
    operation = trial.counted()
    operation.first()
    trial.require_effects(operation, 1)
    for _ in range(3):
        operation.send()
    trial.require_effects(operation, 1)
    if trial.target.is_counted:
        time.sleep(LINGER)  # nothing reports that the server has no more work
        trial.require_effects(operation, 1)
    return "1 effect, 4 requests"


def _replay_is_equal(trial: Trial) -> str:
    operation = trial.operation()
    first = operation.first()
    trial.require_replay(operation.send(), first)
    return f"{first.status}, {len(first.body)} bytes"


def _replay_is_marked(trial: Trial) -> str:
    if trial.profile.marker is None:
        raise NotJudgedError("the profile has no marker; --declare marker=NAME names one")
    name, value = trial.profile.marker
    operation = trial.operation()
    if (seen := operation.first().field(name)) is not None:
        raise ViolationError(f"the first answer has {name}: {seen}")
    if (seen := operation.send().field(name)) != value:
        raise ViolationError(f"the replay has {name}: {seen}")
    return f"{name}: {value}"


def _echo(trial: Trial) -> str:
    if not trial.profile.echoed:
        raise NotJudgedError("the profile doesn't require it")
    operation = trial.operation()
    for answer in (operation.first(), operation.send()):
        if (seen := answer.field(trial.profile.header)) != operation.key:
            raise ViolationError(f"{trial.profile.header} is {seen!r} in {answer}")
    return "in the first answer and in the replay"


def all_answers(answers: list[Answer | Exception]) -> list[Answer]:
    """:raises ViolationError: a request has no answer."""
    found = [answer for answer in answers if isinstance(answer, Answer)]
    if len(found) < len(answers):
        error = next(answer for answer in answers if isinstance(answer, Exception))
        missing = f"{len(answers) - len(found)} of {len(answers)} requests got no answer: {error!r}"
        raise ViolationError(missing, "a request without an answer")
    return found


#: Sends requests at once. Returns their operation, and the answers and whether the requests overlapped.
Sender = Callable[[], tuple[Operation, tuple[list[Answer | Exception], bool]]]


def meeting(trial: Trial, count: int, send: Sender) -> tuple[Operation, list[Answer]]:
    """Send requests at once, and again for another operation if a rate limit let too few of them meet.

    :param count: how many must not be shed.
    :returns: the operation, and the answers to the requests that were not shed.
    :raises NotJudgedError: one was answered before the last was sent, or too many were shed.
    """
    found: list[Answer] = []
    kept: list[Answer] = []
    for _ in range(TRIES):
        operation, (answers, overlapped) = send()
        found = all_answers(answers)
        kept = [answer for answer in found if not operation.is_shed(answer)]
        if len(kept) >= count:
            if not overlapped:
                raise NotJudgedError("the operation is too fast: a request was answered before the last one was sent")
            return operation, kept
        waits = [answer.retry_after or SHED_PAUSE for answer in found if answer not in kept]
        # As the server demands, or until a request that it gave up has ended.
        time.sleep(min(max(waits), trial.target.patience))
    raise NotJudgedError(f"the server shed {len(found) - len(kept)} of {len(found)} requests that were sent at once")


def _require_one_result(trial: Trial, operation: Operation, answers: list[Answer]) -> str:
    """Check the answers to duplicates that were sent while the first request ran."""
    last = trial.require_settled(operation)
    trial.require_effects(operation, 1)
    waiting = [answer for answer in answers if answer.status == trial.profile.in_progress.status]
    for answer in answers:
        if answer.status >= 500 and answer.status not in {trial.profile.in_progress.status, *BUSY}:
            raise HarmError(f"a duplicate was not refused, but broke the server: {answer}", BROKEN)
    if len(results := {(answer.status, answer.content) for answer in answers if trial.profile.is_result(answer)}) > 1:
        raise HarmError(f"simultaneous requests got {len(results)} different successes", "a success without the result")
    for answer in answers:
        if answer not in waiting:
            trial.require_replay(answer, last)
    shed = f", {operation.shed} shed" if operation.shed else ""
    return f"{len(answers) - len(waiting)} got the result, {len(waiting)} got {trial.profile.in_progress.status}{shed}"


def _duplicates(trial: Trial, count: int) -> tuple[Operation, list[Answer]]:
    """Send duplicates at once. At least two are not shed."""

    def send() -> tuple[Operation, tuple[list[Answer | Exception], bool]]:
        operation = trial.counted()
        return operation, operation.together([operation.request()] * count)

    return meeting(trial, 2, send)


def _concurrent(count: int, trial: Trial) -> str:
    return f"1 effect; {_require_one_result(trial, *_duplicates(trial, count))}"


def _late_duplicates(trial: Trial) -> str:
    takes = trial.seconds_of_an_operation()
    operation = trial.counted()
    with ExitStack() as opened:
        connections = [opened.enter_context(operation.connect())]
        connections[0].send_all()
        started = time.monotonic()
        for part in LATE:
            if connections[0].is_answered(within=max(0.0, started + part * takes - time.monotonic())):
                break
            connections.append(opened.enter_context(operation.connect()))
            connections[-1].send_all()
        answers = [connection.attempt() for connection in connections]
    for answer in answers:
        operation.note(answer)
    kept = [answer for answer in all_answers(answers) if not operation.is_shed(answer)]
    operation.shed += len(answers) - len(kept)
    seen = _require_one_result(trial, operation, kept)
    if len(connections) == 1:
        raise NotJudgedError("the operation is too fast: it was answered before a duplicate was sent")
    return f"1 effect, {len(connections) - 1} duplicates while it ran; {seen}"


def _refused_in_progress(trial: Trial) -> list[Answer]:
    """Send two duplicates at once and return the refused ones. Empty if the second waited for the result."""
    _, answers = _duplicates(trial, 2)
    if not any(trial.profile.is_result(answer) for answer in answers):
        raise NotJudgedError(f"neither of two duplicates succeeded: {answers[0]}")
    return [answer for answer in answers if not trial.profile.is_result(answer)]


def _in_progress(trial: Trial) -> str:
    for answer in (refused := _refused_in_progress(trial)):
        trial.require_refusal(answer, trial.profile.in_progress)
    return f"{trial.profile.in_progress.status}" if refused else "the duplicate waited for the result"


def _retry_after(trial: Trial) -> str:
    refused = _refused_in_progress(trial)
    if not refused:
        raise NotJudgedError("duplicates wait for the result")
    if (wait := refused[0].field("Retry-After")) is None:
        raise ViolationError(f"{refused[0]} has no Retry-After")
    if (seconds := refused[0].retry_after) is None:
        raise HarmError(f"Retry-After is neither a number of seconds nor a date: {wait}")
    longest = min(LONGEST_WAIT, trial.target.ttl or LONGEST_WAIT)
    if seconds > longest:
        raise HarmError(f"Retry-After: {wait} is more than {longest:g} seconds")
    return f"Retry-After: {wait}"


def _is_repeated(trial: Trial, body: str, operation: Operation, first: Answer, retry: Answer) -> bool:
    """Whether the retry got the recorded answer.

    :raises NotJudgedError: a replay can't be distinguished from an execution.
    """
    marker = trial.profile.marker
    if marker is not None and retry.field(marker[0]) is not None:
        return True
    if (retry.status, retry.content) != (first.status, first.content):
        return False
    other = trial.operation(body, unique=operation.unique)
    other.fails_with = operation.fails_with
    answer = other.send()
    if (answer.status, other.blank(answer)) == (first.status, operation.blank(first)):
        raise NotJudgedError("two executions have the same answer, so a replay looks like an execution")
    return True


def _error(option: str, statuses: range, expected: Expected, trial: Trial) -> str:
    body = trial.option(option)
    operation = trial.counted(body)
    # The operation itself may have an effect and fail, and its 429 or 503 isn't a rate limit.
    operation.fails_with = frozenset(statuses) - (frozenset({429}) if len(statuses) > 1 else frozenset())
    first = operation.send()
    if first.status not in statuses:
        raise NotJudgedError(f"--{option.replace('_', '-')} was answered with {first}")
    retry = (
        operation.settle(also=SHED - operation.fails_with)
        if first.status != trial.profile.in_progress.status
        else operation.send()
    )
    if retry is not None and trial.profile.is_unknown(retry):
        return f"{first.status}, and the outcome is unknown, as declared: {retry.status}"
    if retry is None or retry.status == trial.profile.in_progress.status != first.status:
        raise HarmError(f"retries for {trial.target.patience:g} s ended with {retry or 'no answer'}", NO_END)
    if retry.status not in statuses and not trial.profile.is_result(retry):
        raise ViolationError(f"the first answer was {first}, and the retry's was {retry}", DIFFERS)
    if expected is Expected.UNSPECIFIED:
        return f"{first.status}, then {retry.status}; the profile doesn't specify whether it is recorded"
    is_repeated = _is_repeated(trial, body, operation, first, retry)
    if expected is Expected.FRESH:
        if is_repeated:
            raise ViolationError(f"the retry got the recorded answer: {retry}")
        return f"{retry.status}, not recorded"
    trial.require_replay(retry, first)
    if not is_repeated or (trial.profile.marker is not None and retry.field(trial.profile.marker[0]) is None):
        raise ViolationError(f"the retry is not marked as a replay: {retry}")
    return f"{retry.status}, recorded"


def _two_keys(trial: Trial) -> str:
    operations: list[Operation] = []

    def send() -> tuple[Operation, tuple[list[Answer | Exception], bool]]:
        operations[:] = [trial.operation(), trial.operation()]
        return operations[0], together([(operation, operation.request()) for operation in operations])

    _, answers = meeting(trial, 2, send)
    for operation, answer in zip(operations, answers, strict=True):
        if answer.status == trial.profile.in_progress.status:
            raise ViolationError(
                f"a key was refused while another key's request ran: {answer}", "keys block each other"
            )
        trial.require_settled(operation)
    return "2 keys, 2 results"


def _others(trial: Trial, count: int) -> list[tuple[Operation, Answer]]:
    """Send operations with different keys at once, retry each until it has a result, and return these."""
    operations = [trial.operation() for _ in range(count)]
    together([(operation, operation.request()) for operation in operations])
    return [(operation, trial.require_settled(operation)) for operation in operations]


def _hundred_keys_between(trial: Trial) -> str:
    operation = trial.counted()
    first = operation.first()
    for _ in range(BETWEEN // BATCH):
        _others(trial, BATCH)
    trial.require_replay(operation.send(), first)
    return f"replayed after {BETWEEN} others"


def _load(trial: Trial) -> str:
    settled = _others(trial, LOAD)
    answers, _ = together([(operation, operation.request()) for operation, _ in settled])
    for (operation, first), answer in zip(settled, answers, strict=True):
        last = operation.settle() if not isinstance(answer, Answer) or not trial.profile.is_result(answer) else answer
        trial.require_replay(trial.require_result(last), first)
    return f"{LOAD} keys at once, and again: each got its own result"


def _remembered(trial: Trial) -> str:
    if (oldest := trial.oldest) is None or trial.target.ttl is not None:
        raise NotJudgedError("with --ttl, the case expiry judges it")
    [(request, [first, *_])] = oldest.results().items()
    oldest.start_counting()
    retry = oldest.send(request)
    if trial.target.is_counted:
        trial.require_effects(oldest, 0)
    trial.require_replay(retry, first)
    return "the first operation of this run is still replayed"


def _late_effects(trial: Trial) -> str:
    trial.require_counter()
    if trial.began_with is None:
        raise NotJudgedError("the run began without a count")
    late = trial.target.effects() - trial.began_with - trial.seen_effects
    if late:
        raise HarmError(f"{late} effects occurred after the case of their request was over", "a late effect")
    return f"{trial.seen_effects} effects, each counted in its case"


def retry_cases(trial: Trial) -> list[Case]:
    """The cases of this module. Some depend on the profile or on the command line."""
    concurrent = "Duplicates that arrive at once have one effect, and each gets the result or has to wait."
    profile = trial.profile
    errors = {
        "client-error": ("A 4xx is recorded as declared.", "refused_body", range(400, 500), profile.client_error),
        "server-error": ("A 5xx is recorded as declared.", "crashing_body", range(500, 600), profile.server_error),
        "throttled": ("A 429 doesn't end a retry.", "throttled_body", range(429, 430), profile.throttled),
        "unavailable": ("A 503 doesn't end a retry.", "unavailable_body", range(503, 504), profile.unavailable),
    }
    return [
        Case("sequential", "Retries of a completed operation have no effect.", PROMISE, _sequential),
        Case("replay-is-equal", "A retry gets the first status, headers and body.", PROMISE, _replay_is_equal),
        Case("replay-is-marked", "A client can distinguish a replay from an execution.", PROMISE, _replay_is_marked),
        Case("echo", "Each answer repeats the key.", PROMISE, _echo),
        *(
            Case(f"concurrent-{count}", concurrent, PROMISE, partial(_concurrent, count))
            for count in trial.target.duplicates
        ),
        Case("late-duplicates", "Late duplicates of a running request have no effect.", PROMISE, _late_duplicates),
        Case("in-progress", "A duplicate waits, or is refused while the first request runs.", PROMISE, _in_progress),
        Case("two-keys", "Two keys of one account don't block each other.", PROMISE, _two_keys),
        Case("load", "Many keys at once get their own results, and again in their retries.", PROMISE, _load),
        Case("hundred-keys-between", "A key is remembered while others are used.", PROMISE, _hundred_keys_between),
        Case("retry-after", "The refusal of a duplicate states when to retry.", _RETRY_AFTER, _retry_after),
        *(
            Case(name, proves, _RECORDED, partial(_error, option, statuses, expected))
            for name, (proves, option, statuses, expected) in errors.items()
        ),
    ]


def closing_cases() -> list[Case]:
    """The cases that come last, because they judge the whole run."""
    return [
        Case("remembered", "A key is remembered while many others are used.", PROMISE, _remembered),
        Case("late-effects", "No effect occurs after its request was judged.", PROMISE, _late_effects),
    ]
