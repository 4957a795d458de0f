"""The cases that need nothing but a running server."""

from __future__ import annotations

import json
from functools import partial

from .judging import PROMISE, Case, Trial, ViolationError
from .profiles import Expected, KeyForm, Level, Rule
from .target import NotJudgedError, Operation
from .wire import Answer, exchange_together

#: For how many seconds an answer would be too early.
EARLY = 0.05
_RETRY_AFTER = Rule(Level.SHOULD, "RFC 9110, section 10.2.3: Retry-After")


def _sequential(trial: Trial) -> str:
    operation = trial.counted()
    operation.first()
    trial.require_effects(operation, 1)
    for _ in range(3):
        operation.send()
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
        raise NotJudgedError("the profile doesn't ask for it")
    operation = trial.operation()
    for answer in (operation.first(), operation.send()):
        if (seen := answer.field(trial.profile.header)) != operation.key:
            raise ViolationError(f"{trial.profile.header} is {seen!r} in {answer}")
    return "in the first answer and in the replay"


def _all_answers(answers: list[Answer | Exception]) -> list[Answer]:
    """:raises NotJudgedError: a request has none."""
    found = [answer for answer in answers if isinstance(answer, Answer)]
    if len(found) < len(answers):
        error = next(answer for answer in answers if isinstance(answer, Exception))
        raise ViolationError(f"{len(answers) - len(found)} of {len(answers)} requests got no answer: {error!r}")
    return found


def _together(operation: Operation, count: int) -> list[Answer]:
    """The answers to duplicates that were sent at once.

    :raises NotJudgedError: one was answered before the last was sent.
    """
    answers, overlapped = exchange_together([operation.request()] * count, operation.target.timeout)
    if not overlapped:
        raise NotJudgedError("the operation is too fast: a duplicate was answered before the last one was sent")
    return _all_answers(answers)


def _concurrent(count: int, trial: Trial) -> str:
    operation = trial.counted()
    answers = _together(operation, count)
    last = trial.require_settled(operation)
    trial.require_effects(operation, 1)
    waiting = [answer for answer in answers if answer.status == trial.profile.in_progress.status]
    for answer in answers:
        if answer not in waiting:
            trial.require_replay(answer, last)
    return (
        f"1 effect; {len(answers) - len(waiting)} got the result, {len(waiting)} got {trial.profile.in_progress.status}"
    )


def _refused_in_progress(trial: Trial) -> list[Answer]:
    """Of two duplicates at once, the one that was refused. None if it has waited for the result instead."""
    answers = _together(trial.operation(), 2)
    if not any(answer.succeeded for answer in answers):
        raise NotJudgedError(f"neither of two duplicates succeeded: {answers[0]}")
    return [answer for answer in answers if not answer.succeeded]


def _in_progress(trial: Trial) -> str:
    for answer in (refused := _refused_in_progress(trial)):
        trial.require_refusal(answer, trial.profile.in_progress)
    return f"{trial.profile.in_progress.status}" if refused else "the duplicate waited for the result"


def _retry_after(trial: Trial) -> str:
    refused = _refused_in_progress(trial)
    if not refused:
        raise NotJudgedError("duplicates wait for the result")
    if (seconds := refused[0].field("Retry-After")) is None:
        raise ViolationError(f"{refused[0]} has no Retry-After")
    return f"Retry-After: {seconds}"


def _other_payload(trial: Trial) -> str:
    operation = trial.counted()
    first = operation.first()
    answer = operation.send(operation.request(body=operation.fill(trial.option("other_body"))))
    trial.require_effects(operation, 1)
    seen = trial.require_refusal(answer, trial.profile.reused)
    trial.require_replay(operation.send(), first)
    return f"{seen}, and the first answer is still replayed"


def _other_payload_in_flight(trial: Trial) -> str:
    operation = trial.counted()
    requests = [operation.request(), operation.request(body=operation.fill(trial.option("other_body")))]
    answers, overlapped = exchange_together(requests, trial.target.timeout)
    if not overlapped:
        raise NotJudgedError("the operation is too fast: it answered before the other payload was sent")
    refused = [answer for answer in _all_answers(answers) if not answer.succeeded]
    trial.require_effects(operation, 1)
    if len(refused) != 1:
        raise ViolationError(f"{len(refused)} of two payloads under one key were refused")
    expected = trial.profile.in_progress
    return trial.require_refusal(refused[0], expected if refused[0].status == expected.status else trial.profile.reused)


def _reordered_payload(trial: Trial) -> str:
    if trial.profile.reordered is not Expected.REPLAYED:
        raise NotJudgedError("the profile doesn't say whether the order of members matters")
    operation = trial.counted()
    members = json.loads(operation.body)
    if len(members) < 2:
        raise NotJudgedError("--body has fewer than two members")
    first = operation.first()
    reordered = json.dumps(dict(reversed(members.items())), indent=1).encode()
    trial.require_replay(operation.send(operation.request(body=reordered)), first)
    trial.require_effects(operation, 1)
    return "replayed"


def _independent(trial: Trial, operation: Operation, answer: Answer) -> str:
    if not answer.succeeded:
        raise ViolationError(f"it was refused: {answer}")
    trial.require_effects(operation, 2)
    return "2 effects"


def _other_account(trial: Trial) -> str:
    account = trial.option("other_account")
    operation = trial.counted()
    operation.first()
    return _independent(trial, operation, operation.send(operation.request(account=account)))


def _other_path(trial: Trial) -> str:
    url = trial.option("other_url")
    operation = trial.counted()
    operation.first()
    answer = operation.send(operation.request(url=url))
    expected = trial.profile.other_path
    if expected is Expected.FRESH or (answer.succeeded and expected is Expected.UNSPECIFIED):
        return _independent(trial, operation, answer)
    seen = trial.require_refusal(answer, trial.profile.reused)
    trial.require_effects(operation, 1)
    return seen


def _missing_key(trial: Trial) -> str:
    operation = trial.counted()
    keyless = operation.request(keys=())
    if trial.profile.missing is not None:
        seen = trial.require_refusal(operation.send(keyless), trial.profile.missing)
        trial.require_effects(operation, 0)
        return seen
    if any(not operation.send(request).succeeded for request in (keyless, trial.operation().request(keys=()))):
        raise ViolationError("a request without a key was refused")
    trial.require_effects(operation, 2)
    return "each request runs"


def _key_form(form: KeyForm, trial: Trial) -> str:
    operation = trial.operation(length=form.length)
    operation.start_counting()
    request = operation.request(keys=tuple(value.replace(b"{key}", operation.key.encode()) for value in form.values))
    with operation.connect(request) as connection:
        connection.send_all()
        answer = connection.attempt()
    if isinstance(answer, Answer) and answer.succeeded and form.is_valid is not False:
        trial.require_replay(operation.send(request), answer)
        trial.require_effects(operation, 1)
        return "accepted, and honoured"
    if form.is_valid or (isinstance(answer, Answer) and (answer.succeeded or answer.status >= 500)):
        raise ViolationError(f"expected it to be {'accepted' if form.is_valid else 'refused'}, got {answer}")
    trial.require_effects(operation, 0)
    return f"refused: {answer}"


def _error(option: str, statuses: range, trial: Trial) -> str:
    expected = trial.profile.client_error if option == "refused_body" else trial.profile.server_error
    if expected is Expected.UNSPECIFIED:
        raise NotJudgedError("the profile doesn't say whether it is recorded")
    operation = trial.operation(trial.option(option))
    operation.start_counting()
    first = operation.send()
    if first.status not in statuses:
        raise NotJudgedError(f"--{option.replace('_', '-')} was answered with {first}")
    after_first = operation.effects()
    retry = operation.send()
    ran_again = retry.body != first.body or operation.effects() > after_first
    name = trial.profile.marker[0] if trial.profile.marker else ""
    is_marked = retry.field(name) is not None
    if expected is Expected.REPLAYED:
        trial.require_replay(retry, first)
        trial.require_effects(operation, after_first)
        if name and not is_marked:
            raise ViolationError(f"the retry has no {name}")
        if not (name or after_first):
            raise NotJudgedError("without an effect and without a marker, a replay looks like a second execution")
        return f"{retry.status}, recorded"
    if is_marked:
        raise ViolationError(f"the retry is marked as a replay: {retry}")
    if not ran_again:
        raise NotJudgedError("without an effect, and with equal answers, a second execution looks like a replay")
    return "not recorded"


def _half_close(trial: Trial, data: bytes, operation: Operation) -> Answer | Exception:
    """Send so much, say that nothing more follows, and wait for what the server makes of it."""
    if trial.target.url.startswith("https:"):
        raise NotJudgedError("a TLS connection can't be closed in one direction")
    with operation.connect() as connection:
        connection.send(data)
        connection.half_close()
        return connection.attempt()


def _cut_before_the_end(trial: Trial) -> str:
    operation = trial.counted()
    request = operation.request()
    answer = _half_close(trial, (request.head + request.body)[:-1], operation)
    if operation.effects() or (isinstance(answer, Answer) and answer.succeeded):
        raise ViolationError(f"half a request was taken for a whole one: {answer}")
    trial.require_settled(operation)
    trial.require_effects(operation, 1)
    return "1 effect, of the retry"


def _cut_after_the_end(trial: Trial) -> str:
    operation = trial.counted()
    with operation.connect() as connection:
        connection.send_all()
        connection.reset()
    trial.require_one_effect(operation)
    return "1 effect, replayed"


def _half_closed(trial: Trial) -> str:
    operation = trial.counted()
    request = operation.request()
    answer = _half_close(trial, request.head + request.body, operation)
    if isinstance(answer, Answer):
        return _answered_once(trial, operation, answer)
    trial.require_one_effect(operation)
    return "1 effect; the server gave up the connection"


def _in_pieces(trial: Trial) -> str:
    operation = trial.counted()
    request = operation.request()
    half = len(request.body) // 2
    with operation.connect(request) as connection:
        for piece in (request.head, request.body[:half]):
            connection.send(piece)
            if connection.is_answered(within=EARLY):
                raise ViolationError(f"it was answered before it was complete: {connection.attempt()}")
        connection.send(request.body[half:])
        return _answered_once(trial, operation, connection.attempt())


def _answered_once(trial: Trial, operation: Operation, answer: Answer | Exception) -> str:
    trial.require_one_effect(operation, _all_answers([answer])[0])
    return "answered, 1 effect"


def plain_cases(trial: Trial) -> list[Case]:
    """The cases of this module. Some depend on the profile or on the command line."""
    concurrent = "Duplicates that arrive at once have one effect, and each gets its result or is told to wait."
    return [
        Case("sequential", "Retries of a completed operation have no effect.", PROMISE, _sequential),
        Case("replay-is-equal", "A retry gets the first status, headers and body.", PROMISE, _replay_is_equal),
        Case("replay-is-marked", "A client can tell a replay from an execution.", PROMISE, _replay_is_marked),
        Case("echo", "Each answer repeats the key.", PROMISE, _echo),
        *(
            Case(f"concurrent-{count}", concurrent, PROMISE, partial(_concurrent, count))
            for count in trial.target.duplicates
        ),
        Case("in-progress", "A duplicate waits, or learns that the first request runs.", PROMISE, _in_progress),
        Case("retry-after", "The refusal of a running duplicate says when to retry.", _RETRY_AFTER, _retry_after),
        Case("other-payload", "A key can't be used for another request.", PROMISE, _other_payload),
        Case("other-payload-in-flight", "Nor while the first one runs.", PROMISE, _other_payload_in_flight),
        Case("reordered-payload", "The same JSON in another order is a retry.", PROMISE, _reordered_payload),
        Case("other-account", "Two accounts can use one key without meeting.", PROMISE, _other_account),
        Case("other-path", "A key on another path never gets this path's answer.", PROMISE, _other_path),
        Case("missing-key", "A request without a key is treated as documented.", PROMISE, _missing_key),
        *(
            Case(
                f"key: {form.name}",
                "The form of the key is treated as documented.",
                form.rule,
                partial(_key_form, form),
            )
            for form in trial.profile.keys
        ),
        Case(
            "client-error", "A 4xx is recorded as declared.", PROMISE, partial(_error, "refused_body", range(400, 500))
        ),
        Case(
            "server-error", "A 5xx is recorded as declared.", PROMISE, partial(_error, "crashing_body", range(500, 600))
        ),
        Case(
            "cut-before-the-end", "Half a request has no effect, and its retry has one.", PROMISE, _cut_before_the_end
        ),
        Case("cut-after-the-end", "A client that didn't read the answer retries safely.", PROMISE, _cut_after_the_end),
        Case("half-closed", "A client that closes its direction causes no second effect.", PROMISE, _half_closed),
        Case("in-pieces", "A request that arrives in pieces is one request.", PROMISE, _in_pieces),
    ]
