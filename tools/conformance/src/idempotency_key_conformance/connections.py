"""Cases in which the client's connection ends early, or delivers the request in pieces."""

from __future__ import annotations

from .cases import TRIES, all_answers
from .judging import Case, Trial
from .profiles import PROMISE
from .target import BROKEN, HarmError, NotJudgedError, Operation, ViolationError
from .wire import Answer

#: How long to wait for a premature answer after each piece, in seconds.
EARLY = 0.05


def _half_close(trial: Trial, data: bytes, operation: Operation) -> Answer | Exception:
    """Send ``data``, close the sending direction, and return the server's answer."""
    if trial.target.url.startswith("https:"):
        raise NotJudgedError("a TLS connection can't be closed in one direction")

    def attempt() -> Answer | Exception:
        with operation.connect() as connection:
            connection.send(data)
            connection.half_close()
            answer = connection.attempt()
        operation.note(answer)
        return answer

    return operation.unless_shed(attempt)


def _cut_before_the_end(trial: Trial) -> str:
    operation = trial.counted()
    request = operation.request()
    answer = _half_close(trial, (request.head + request.body)[:-1], operation)
    if operation.effects() or (isinstance(answer, Answer) and answer.succeeded):
        raise HarmError(f"an incomplete request was taken for a whole one: {answer}", "an incomplete request is run")
    trial.require_settled(operation)
    trial.require_effects(operation, 1)
    return "1 effect, from the retry"


def _cut_after_the_end(trial: Trial) -> str:
    trial.require_counter()
    for _ in range(TRIES):
        takes = trial.seconds_of_an_operation()
        operation = trial.counted()
        with operation.connect() as connection:
            connection.send_all()
            # The server has read the request by then, and a reset doesn't discard it.
            is_late = connection.is_answered(within=takes / 2)
            if is_late:
                operation.note(connection.attempt())
            else:
                connection.reset()
        trial.require_one_effect(operation, trial.require_settled(operation))
        if not is_late:
            return "1 effect, replayed"
    raise NotJudgedError(f"{TRIES} times, the operation was answered before the connection was cut")


def _half_closed(trial: Trial) -> str:
    operation = trial.counted()
    request = operation.request()
    answer = _half_close(trial, request.head + request.body, operation)
    if isinstance(answer, Answer):
        return _answered_once(trial, operation, answer)
    trial.require_one_effect(operation, trial.require_settled(operation))
    return "1 effect; the server dropped the connection"


def _in_pieces(trial: Trial) -> str:
    operation = trial.counted()
    request = operation.request()
    half = len(request.body) // 2

    def attempt() -> Answer | Exception:
        with operation.connect(request) as connection:
            for piece in (request.head, request.body[:half]):
                connection.send(piece)
                if connection.is_answered(within=EARLY):
                    early = connection.attempt()
                    operation.note(early)
                    if not operation.is_shed(early):
                        raise ViolationError(f"it was answered before it was complete: {early}")
                    return early
            connection.send(request.body[half:])
            answer = connection.attempt()
        operation.note(answer)
        return answer

    return _answered_once(trial, operation, operation.unless_shed(attempt))


def _one_connection(trial: Trial) -> str:
    """Send a request, its retry, and another operation's request on a connection that stays open."""
    operation, other = trial.operation(), trial.operation()
    request, last = (each.request(connection=b"keep-alive") for each in (operation, other))
    answers: list[Answer] = []
    with operation.connect(request) as connection:
        for owner, sent in ((operation, request), (operation, request), (other, last)):
            if answers:
                owner.note_sent(sent)
            connection.send(sent.head + sent.body)
            answer = connection.attempt()
            owner.note(answer, sent)
            if len(answers) == 1 and not isinstance(answer, Answer):
                raise NotJudgedError(f"the server closes the connection after an answer: {answer!r}")
            if owner.is_shed(answer):
                owner.shed += 1
                raise NotJudgedError(f"the server shed a request: {answer}")
            answers += all_answers([answer])
            if not (connection.is_kept or sent is last):
                raise NotJudgedError("the server closes the connection after an answer")
    for answer in answers:
        if not trial.profile.is_result(answer):
            raise HarmError(f"a request on a connection that was used before got {answer}", BROKEN)
    trial.require_replay(answers[1], answers[0])
    return "3 requests, each with its own answer"


def _answered_once(trial: Trial, operation: Operation, answer: Answer | Exception) -> str:
    [first] = all_answers([answer])
    trial.require_one_effect(operation, trial.require_settled(operation), first)
    return "answered, 1 effect"


def connection_cases() -> list[Case]:
    """The cases of this module."""
    return [
        Case("cut-before-the-end", "A truncated request has no effect; its retry does.", PROMISE, _cut_before_the_end),
        Case("cut-after-the-end", "A client that didn't read the answer retries safely.", PROMISE, _cut_after_the_end),
        Case("half-closed", "A half-closed connection causes no second effect.", PROMISE, _half_closed),
        Case("one-connection", "A retry leaves its connection usable.", PROMISE, _one_connection),
        Case("in-pieces", "A request that arrives in pieces is one request.", PROMISE, _in_pieces),
    ]
