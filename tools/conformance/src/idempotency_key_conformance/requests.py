"""Cases in which a key, or a similar one, is sent with another request, and cases about the key's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from uuid import uuid4

from .cases import meeting
from .judging import Case, Trial
from .profiles import PROMISE, Expected, KeyForm
from .target import ANOTHERS_RESULT, BROKEN, HarmError, NotJudgedError, Operation, ViolationError, new_key
from .wire import Answer, Request

#: The only acceptable 5xx for a method that the server doesn't have.
NOT_IMPLEMENTED = 501


def _other_payload(trial: Trial) -> str:
    other_body = trial.option("other_body")
    operation = trial.counted()
    first = operation.first()
    answer = operation.send(operation.request(body=operation.fill(other_body)))
    last = operation.send()
    trial.require_effects(operation, 1)  # after the last request: a refusal must not forget the first one
    seen = trial.require_refusal(answer, trial.profile.reused)
    trial.require_replay(last, first)
    return f"{seen}, and the first answer is still replayed"


def _pair(trial: Trial, other: Callable[[Operation], Request]) -> tuple[Operation, list[Answer]]:
    """Send a request and another one with its key at once."""

    def send() -> tuple[Operation, tuple[list[Answer | Exception], bool]]:
        operation = trial.counted()
        return operation, operation.together([operation.request(), other(operation)])

    return meeting(trial, 2, send)


def _other_payload_in_flight(trial: Trial) -> str:
    other_body = trial.option("other_body")
    operation, found = _pair(trial, lambda operation: operation.request(body=operation.fill(other_body)))
    expected = trial.profile.in_progress
    if broken := [answer for answer in found if answer.status >= 500 and answer.status != expected.status]:
        raise HarmError(f"it was not refused, but broke the server: {broken[0]}", BROKEN)
    refused = [answer for answer in found if not trial.profile.is_result(answer)]
    trial.require_effects(operation, 1)
    if len(refused) != 1:
        raise ViolationError(f"{len(refused)} of two payloads under one key were refused")
    return trial.require_refusal(refused[0], expected if refused[0].status == expected.status else trial.profile.reused)


def _reordered_payload(trial: Trial) -> str:
    if trial.profile.reordered is not Expected.REPLAYED:
        raise NotJudgedError("the profile doesn't specify whether the order of members matters")
    operation = trial.counted()
    try:
        members = json.loads(operation.body)
    except ValueError:
        members = None
    if not isinstance(members, dict) or len(members) < 2:
        raise NotJudgedError("--body is not a JSON object with two members or more")
    first = operation.first()
    reordered = json.dumps(dict(reversed(members.items())), indent=1).encode()
    again = operation.send(operation.request(body=reordered), retries=operation.request())
    trial.require_replay(again, first)
    trial.require_effects(operation, 1)
    return "replayed"


def _independent(trial: Trial, operation: Operation, answer: Answer) -> str:
    if not trial.profile.is_result(answer):
        if answer.status >= 500:
            raise HarmError(f"it was refused: {answer}", BROKEN)
        raise ViolationError(f"it was refused: {answer}")
    trial.require_effects(operation, 2)
    return "2 effects"


def _other_account(trial: Trial) -> str:
    account = trial.option("other_account")
    operation = trial.counted()
    operation.first()
    return _independent(trial, operation, operation.send(operation.request(account=account)))


def _other_account_in_flight(trial: Trial) -> str:
    account = trial.option("other_account")
    operation, found = _pair(trial, lambda operation: operation.request(account=account))
    refused = [answer for answer in found if not trial.profile.is_result(answer)]
    return _independent(trial, operation, [*refused, *found][0])


def _other_account_after_a_refusal(trial: Trial) -> str:
    account, other_body = trial.option("other_account"), trial.option("other_body")
    operation = trial.counted()
    operation.first()
    operation.send(operation.request(body=operation.fill(other_body)))
    seen = _independent(trial, operation, operation.send(operation.request(account=account)))
    if trial.target.refused_body is None:
        return seen
    refused = trial.counted(trial.target.refused_body)
    refused.fails_with = frozenset(range(400, 500)) - {429}
    answer = refused.send()
    if trial.profile.is_result(answer):
        raise NotJudgedError(f"--refused-body was answered with {answer}")
    other = trial.operation(key=refused.key, unique=refused.unique)
    answer = other.send(other.request(account=account))
    if not trial.profile.is_result(answer):
        raise ViolationError(f"another account's key was refused after a refusal: {answer}")
    return f"{seen}, and a result after another account's refusal"


def _varied(varied: str, trial: Trial) -> str:
    if varied == "chunked":  # WSGI, for example, doesn't specify how to read it
        probe = trial.operation()
        if not trial.profile.is_result(answer := probe.send(probe.request(is_chunked=True))):
            raise NotJudgedError(f"the server doesn't take a chunked body: {answer}")
    operation = trial.counted()
    request, may_be_refused = _VARIATIONS[varied](operation)
    first = operation.first()
    answer = operation.send(request, retries=operation.request())
    trial.require_effects(operation, 1)
    if answer.status in may_be_refused and not trial.profile.is_result(answer):
        return f"refused without an effect: {answer.status}"
    if not trial.profile.is_result(answer):
        raise ViolationError(f"the retry was refused: {answer}")
    trial.require_replay(answer, first)
    return "replayed"


def _with_fields(*fields: str) -> Callable[[Operation], tuple[Request, Collection[int]]]:
    return lambda operation: (operation.request(more=fields), ())


def _with_white_space(operation: Operation) -> tuple[Request, Collection[int]]:
    try:
        body = json.dumps(json.loads(operation.body), indent=3).encode()
    except ValueError as error:
        raise NotJudgedError("--body is not JSON") from error
    if body == operation.body:
        raise NotJudgedError("--body has no member, and no white space to vary")
    # A server may compare bytes, unless its profile says that JSON is compared.
    is_compared = operation.profile.reordered is Expected.REPLAYED
    return operation.request(body=body), () if is_compared else {operation.profile.reused.status}


#: Requests of another instance of the same client, by what differs, and the statuses with which a server may refuse it.
_VARIATIONS: dict[str, Callable[[Operation], tuple[Request, Collection[int]]]] = {
    "User-Agent": _with_fields("User-Agent: another-instance/2.0"),
    # A cookie or a language isn't varied: they may change who the client is, and what the answer says.
    "Accept": _with_fields("Accept: application/json, */*;q=0.9", "Cache-Control: no-cache"),
    "lower case": lambda operation: (operation.request(is_lower_case=True), ()),
    "traceparent": _with_fields("traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    "X-Request-Id": _with_fields("X-Request-Id: 0f9c2f6e-another-instance"),
    "white space": _with_white_space,
    "chunked": lambda operation: (operation.request(is_chunked=True), ()),
    "credential": lambda operation: (operation.request(account=operation.target.same_account), ()),
}


def _another_credential(trial: Trial) -> str:
    trial.option("same_account")
    return _varied("credential", trial)


def _other_path(trial: Trial) -> str:
    url = trial.option("other_url")
    probe = trial.operation()
    if not trial.profile.is_result(answer := probe.send(probe.request(url=url))):
        raise NotJudgedError(f"--other-url doesn't take --body: {answer}")
    operation = trial.counted()
    operation.first()
    answer = operation.send(operation.request(url=url))
    expected = trial.profile.other_path
    if expected is Expected.FRESH or (trial.profile.is_result(answer) and expected is Expected.UNSPECIFIED):
        return _independent(trial, operation, answer)
    seen = trial.require_refusal(answer, trial.profile.reused)
    trial.require_effects(operation, 1)
    return seen


def _refused_or_independent(trial: Trial, operation: Operation, answer: Answer) -> str:
    if trial.profile.is_result(answer):
        return _independent(trial, operation, answer)
    if answer.status >= 500 and answer.status != NOT_IMPLEMENTED:
        raise HarmError(f"it was not refused, but broke the server: {answer}", BROKEN)
    trial.require_effects(operation, 1)
    return f"refused: {answer.status}"


def _no_credentials(trial: Trial) -> str:
    if not trial.target.credentials:
        raise NotJudgedError("the requests have no credentials: --header, and --other-account if the name isn't usual")
    operation = trial.counted()
    operation.first()
    return _refused_or_independent(trial, operation, operation.send(operation.request(is_anonymous=True)))


def _other_method(method: str, trial: Trial) -> str:
    body = b"" if method == "GET" else None
    control = Operation(trial.target, trial.profile)
    control.start_counting()
    if trial.profile.is_result(control.send(control.request(method=method, body=body))) and not control.effects():
        operation = trial.operation()
        first = operation.first()
        readers = [Operation(trial.target, trial.profile, key=key) for key in (operation.key, None)]
        answer, other = (reader.send(reader.request(method=method, body=body)) for reader in readers)
        # With any key, the state that the operation left may look like its result.
        if trial.results_differ and answer.content == first.content != other.content:
            raise HarmError(f"{method} was answered with another method's result: {answer}", ANOTHERS_RESULT)
        raise NotJudgedError(f"{method} succeeds without an effect, so it is another operation")
    trial.operations.append(control)
    operation = trial.counted()
    operation.first()
    return _refused_or_independent(trial, operation, operation.send(operation.request(method=method, body=body)))


def _similar_keys(odd: str, plain: str, trial: Trial) -> str:
    """
    :param odd: a key that the server may refuse for its form. ``{key}`` in both is replaced by a fresh key.
    """
    for first, second in ((odd, plain), (plain, odd)):
        fresh = uuid4().hex
        operations = [trial.operation(key=key.replace("{key}", fresh), unique=fresh) for key in (first, second)]
        answer = operations[0].send()
        if answer.status >= 500:
            raise HarmError(f"{operations[0].key!r} was not refused, but broke the server: {answer}", BROKEN)
        if not trial.profile.is_result(answer):
            raise NotJudgedError(f"the server refuses such a key: {answer}")
        other = operations[1].send()
        if not trial.profile.is_result(other):
            raise HarmError(f"{operations[1].key!r} was refused after {operations[0].key!r}: {other}")
    return "two keys, two results, in both orders"


def _missing_key(trial: Trial) -> str:
    operation = trial.counted()
    keyless = operation.request(keys=())
    if trial.profile.missing is not None:
        answer = operation.send(keyless)
        if trial.profile.is_result(answer):
            raise ViolationError(f"expected {trial.profile.missing.status}, got {answer}")
        seen = trial.require_refusal(answer, trial.profile.missing)
        trial.require_effects(operation, 0)
        return seen
    other = trial.operation()
    for answer in (operation.send(keyless), other.send(other.request(keys=()))):
        if not trial.profile.is_result(answer):
            raise ViolationError(f"a request without a key was refused: {answer}")
    return "each request runs"


def _key_form(form: KeyForm, trial: Trial) -> str:
    operation = trial.operation(key=new_key(form.length))
    operation.start_counting()
    request = operation.request(keys=tuple(value.replace(b"{key}", operation.key.encode()) for value in form.values))

    def attempt() -> Answer | Exception:
        with operation.connect(request) as connection:
            connection.send_all()
            found = connection.attempt()
        operation.note(found, request)
        return found

    answer = operation.unless_shed(attempt)
    if isinstance(answer, Answer) and trial.profile.is_result(answer) and form.is_valid is not False:
        trial.require_replay(operation.send(request), answer)
        trial.require_effects(operation, 1)
        return "accepted and honoured"
    if isinstance(answer, Answer) and answer.status >= 500:
        raise HarmError(f"expected it to be {'accepted' if form.is_valid else 'refused'}, got {answer}")
    if form.is_valid or (isinstance(answer, Answer) and trial.profile.is_result(answer)):
        raise ViolationError(f"expected it to be {'accepted' if form.is_valid else 'refused'}, got {answer}")
    trial.require_effects(operation, 0)
    return f"refused: {answer}"


#: Pairs of similar keys by name. A server may refuse the first of a pair for its form. A server that cuts keys also
#: confuses those that end differently, so the lengths come first.
_SIMILAR = {
    "the first character": ("a{key}", "b{key}"),
    **{
        f"character {length}": tuple("{key}" + "x" * (length - 33) + last for last in "ab")
        for length in (36, 64, 255, 300)
    },
    "case": ("K-{key}-ABC", "K-{key}-abc"),
    "blanks": ("k {key} a", "k {key}a"),
    "a blank at the end": ("{key} ", "{key}"),
    "-": ("k-{key}", "k{key}"),
    "_": ("k_{key}", "kx{key}"),
    "/": ("k/{key}", "{key}"),
    "%": ("k%{key}", "kxyz{key}"),
    "%41": ("k%41{key}", "kA{key}"),
}


def request_cases(trial: Trial) -> list[Case]:
    """The cases of this module. Some depend on the profile."""
    alone = "A key never discloses the result of another request, or part of it."
    similar = "Similar keys are different keys."
    return [
        Case("other-payload", "A key can't be used for another request.", PROMISE, _other_payload),
        Case("other-payload-in-flight", "The same, while the first one runs.", PROMISE, _other_payload_in_flight),
        Case("reordered-payload", "The same JSON in another order is a retry.", PROMISE, _reordered_payload),
        Case("other-account", "Two accounts can use the same key independently.", PROMISE, _other_account),
        Case("other-account-in-flight", "The same, at the same time.", PROMISE, _other_account_in_flight),
        Case(
            "other-account-after-a-refusal",
            "A refusal of one account doesn't bind another one.",
            PROMISE,
            _other_account_after_a_refusal,
        ),
        *(
            Case(
                f"another-instance: {varied}",
                "A retry by another instance of the client is a retry.",
                PROMISE,
                partial(_varied, varied),
            )
            for varied in _VARIATIONS
            if varied != "credential"
        ),
        Case(
            "another-credential",
            "A retry with another credential of the account is a retry.",
            PROMISE,
            _another_credential,
        ),
        Case("no-credentials", "Without credentials, a key discloses nothing.", PROMISE, _no_credentials),
        Case("other-path", "A key on another path never gets this path's answer.", PROMISE, _other_path),
        *(
            Case(f"other-method: {method}", alone, PROMISE, partial(_other_method, method))
            for method in ("GET", "POST", "PUT", "PATCH")
            if method != trial.target.method
        ),
        *(
            Case(f"similar-keys: {name}", similar, PROMISE, partial(_similar_keys, odd, plain))
            for name, (odd, plain) in _SIMILAR.items()
            if trial.profile.quoted or not odd.endswith(" ")
        ),
        Case("missing-key", "A request without a key is treated as documented.", PROMISE, _missing_key),
        *(
            Case(
                f"key: {form.name}",
                "The form of the key is treated as documented.",
                form.rule,
                partial(_key_form, form),
            )
            for form in trial.profile.keys
            # Where a key is optional, an empty field may count as a missing key.
            if trial.profile.missing is not None or form.values != (b"",)
        ),
    ]
