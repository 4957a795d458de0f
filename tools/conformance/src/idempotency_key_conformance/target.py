"""The server under test: its URL, the requests to send, and how to count effects outside the server."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import uuid4

from .profiles import Profile
from .wire import WIRE_ERRORS, Answer, Connection, Request, build, exchange, exchange_together

#: Seconds between two retries without a Retry-After, and the longest wait for a running request with one.
PAUSE, LONGEST_PAUSE = 0.05, 1.0
#: The statuses after which a client retries, in addition to the profile's ``in_progress``.
BUSY = frozenset({425, 429, 502, 503, 504})
#: The statuses by which a rate limit or an overloaded server sheds a request without regard to its key.
SHED = frozenset({429, 503})
#: Seconds before a shed request without a Retry-After is repeated, and how many times it is.
SHED_PAUSE, SHED_TRIES = 0.5, 3
#: How many other operations must succeed before a request that is still shed counts as refused for its key.
CONTROLS = 3
#: Header fields that identify a caller, unless ``--other-account`` names another one.
CREDENTIALS = frozenset({"authorization", "cookie", "x-api-key"})


#: Causes that several cases may find.
SECOND_EFFECT = "a second effect"
NO_EFFECT = "a success without an effect"
ANOTHERS_RESULT = "another request's result"
NO_END = "retries without an end"
BROKEN = "an error instead of a refusal"


class NotJudgedError(Exception):
    """This case can't be judged. The message gives the reason."""


class ViolationError(Exception):
    """The server breaks the rule of the case. The message describes how."""

    def __init__(self, message: str, cause: str | None = None) -> None:
        """
        :param cause: what several cases may find; by default the message.
        """
        super().__init__(message)
        self.cause: Final = cause or message


class HarmError(ViolationError):
    """A client is harmed, which is a failure even if the rule of the case is a SHOULD.

    There was a second effect; a success was reported for an operation that didn't run; a result was shown to the wrong
    request; retries never end; or the server failed where it had to refuse.
    """


@dataclass(frozen=True, kw_only=True)
class Target:
    """The options that describe a server. ``{unique}`` in a body is replaced by a new value for each operation."""

    url: str
    method: str = "POST"
    body: str
    other_body: str | None = None
    #: Bodies that the operation answers with 4xx, with 5xx, with 429 and with 503.
    refused_body: str | None = None
    crashing_body: str | None = None
    throttled_body: str | None = None
    unavailable_body: str | None = None
    other_url: str | None = None
    #: ``Name: value``, added to each request.
    fields: tuple[str, ...] = ("Content-Type: application/json",)
    #: The field with which another account replaces the field of the same name, and another credential of the same one.
    other_account: str | None = None
    same_account: str | None = None
    #: A URL or a command that shows the number of effects, possibly among other numbers.
    count_url: str | None = None
    count_command: str | None = None
    #: The index of that number.
    count_index: int = 0
    #: How many duplicates are sent at once, one case for each number.
    duplicates: tuple[int, ...] = (2, 50, 200)
    #: The retention in seconds, if it is short enough to wait for.
    ttl: float | None = None
    #: By name: kill, restart, freeze, thaw.
    commands: Mapping[str, str] = field(default_factory=dict)
    #: How long to wait for an answer, and how long to keep retrying, in seconds.
    timeout: float = 30.0
    patience: float = 120.0

    @property
    def is_counted(self) -> bool:
        return self.count_url is not None or self.count_command is not None

    @property
    def credentials(self) -> frozenset[str]:
        """The names, in lower case, of the header fields that identify the caller."""
        if self.other_account is not None:
            return frozenset({_name(self.other_account)})
        return CREDENTIALS.intersection(map(_name, self.fields))

    def counted(self) -> list[int]:
        """All numbers that the counter shows.

        :raises NotJudgedError: it can't be read, or shows none.
        """
        text = self._count_page(self.count_url) if self.count_url is not None else self._run(self.count_command or "")
        if not (numbers := [int(number) for number in re.findall(r"\d+", text)]):
            raise NotJudgedError(f"the counter shows no number, but {text[:80]!r}")
        return numbers

    def _count_page(self, url: str) -> str:
        request = build("GET", url, _lines(self.fields), b"")
        tries = 0
        while True:
            try:
                answer = exchange(request, self.timeout)
            except (*WIRE_ERRORS, ValueError) as error:
                raise NotJudgedError(f"{url} can't be read: {error!r}") from error
            tries += 1
            if answer.status not in SHED or tries > SHED_TRIES:
                break
            time.sleep(min(answer.retry_after or SHED_PAUSE, self.patience))  # as the server demands
        if not answer.succeeded:
            raise NotJudgedError(f"{url} can't be read: it answered {answer}")
        return answer.body.decode(errors="replace")

    def effects(self) -> int:
        """The number of effects so far.

        :raises NotJudgedError: as ``counted``.
        """
        numbers = self.counted()
        if self.count_index >= len(numbers):
            raise NotJudgedError(f"the counter shows only {len(numbers)} numbers")
        return numbers[self.count_index]

    def require_commands(self, *names: str) -> None:
        """:raises NotJudgedError: one of the optional commands was not given."""
        for name in names:
            if name not in self.commands:
                raise NotJudgedError(f"this case needs --{name}")

    def strike(self, name: str) -> None:
        """Run one of the optional commands.

        :raises NotJudgedError: it failed.
        """
        self._run(self.commands[name])

    def _run(self, command: str) -> str:
        try:
            # The person who runs the suite wrote the command.
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise NotJudgedError(f"{command!r} failed: {error}") from error
        return done.stdout


def _name(line: str) -> str:
    return line.partition(":")[0].strip().lower()


def _lines(fields: tuple[str, ...]) -> list[tuple[str, bytes]]:
    return [(name, value.strip().encode()) for name, _, value in (line.partition(":") for line in fields)]


def new_key(length: int = 36) -> str:
    return str(uuid4()).ljust(length, "x")


#: What an attempt to send a request returns.
Sent = TypeVar("Sent", Answer, Answer | Exception)


class Operation:
    """One logical operation: a fresh key, a body, and all answers to requests with that key."""

    def __init__(
        self, target: Target, profile: Profile, body: str | None = None, *, key: str | None = None, unique: str = ""
    ) -> None:
        """
        :param body: the body; by default the target's.
        :param key: the key; by default a fresh one.
        :param unique: the value of ``{unique}``; by default a fresh one.
        """
        self.target: Final = target
        self.profile: Final = profile
        self.key: Final = key or new_key()
        self.unique: Final = unique or uuid4().hex
        self.body: bytes = self.fill(target.body if body is None else body)
        #: How often each request was sent, and the answers to it. A request and its retries count as one.
        self.sent: Counter[Request] = Counter()
        self.answers: dict[Request, list[Answer]] = {}
        #: Whether ``body`` makes the operation itself fail, which may have an effect, and with which status.
        self.fails_with: frozenset[int] = frozenset()
        #: How many requests were shed, and the other operations that show whether a rate limit shed them.
        self.shed = 0
        self.controls: list[Operation] = []
        #: How long the last ``send`` took, in seconds, without waits for a rate limit.
        self.took = 0.0
        self._before = 0

    def fill(self, body: str) -> bytes:
        return body.replace("{unique}", self.unique).encode()

    def blank(self, answer: Answer) -> bytes:
        """The body of an answer without the values that it echoes from the request."""
        return answer.body.replace(self.key.encode(), b"").replace(self.unique.encode(), b"")

    def request(
        self,
        *,
        body: bytes | None = None,
        keys: tuple[bytes, ...] | None = None,
        url: str | None = None,
        method: str | None = None,
        account: str | None = None,
        is_anonymous: bool = False,
        more: tuple[str, ...] = (),
        is_chunked: bool = False,
        is_lower_case: bool = False,
        connection: bytes = b"close",
    ) -> Request:
        """
        :param keys: the values of the key's header field, which is sent once for each.
        :param account: a header field that replaces the field of the same name.
        :param is_anonymous: leave the caller's credentials out.
        :param more: other header fields to add.
        :param is_lower_case: send the names of the fields in lower case, as a gateway from HTTP/2 does.
        """
        if keys is None:
            keys = ((f'"{self.key}"' if self.profile.quoted else self.key).encode(),)
        replaced = self.target.credentials if is_anonymous else {_name(account)} if account else set()
        fields = (
            *(line for line in self.target.fields if _name(line) not in replaced),
            *([account] if account else []),
            *more,
        )
        lines = [*_lines(fields), *((self.profile.header, value) for value in keys)]
        if is_lower_case:
            lines = [(name.lower(), value) for name, value in lines]
        body = self.body if body is None else body
        method, url = method or self.target.method, url or self.target.url
        return build(method, url, lines, body, is_chunked=is_chunked, connection=connection)

    def start_counting(self) -> None:
        if self.target.is_counted:
            self._before = self.target.effects()

    def effects(self) -> int:
        """The number of effects since ``start_counting``. Without a counter, the number of different results."""
        if self.target.is_counted:
            return self.target.effects() - self._before - sum(len(control.results()) for control in self.controls)
        return len({result.content for results in self.results().values() for result in results})

    def results(self) -> dict[Request, list[Answer]]:
        """The requests with the answers that report that the operation ran."""
        found = {
            request: [answer for answer in answers if self.profile.is_result(answer)]
            for request, answers in self.answers.items()
        }
        return {request: results for request, results in found.items() if results}

    def may_have_run(self, request: Request) -> bool:
        """Whether the request may have had an effect: it was accepted, an answer is missing, or the server failed."""
        answers = self.answers[request]
        is_refused = all(answer.status < 500 and not self.profile.is_result(answer) for answer in answers)
        return bool(self.fails_with) or self.sent[request] > len(answers) or not is_refused

    @property
    def may_still_run(self) -> bool:
        """Whether a request without a result may run after its answer: it was shed, or has no answer."""
        is_unanswered = any(count > len(self.answers[request]) for request, count in self.sent.items())
        return not self.results() and (self.shed > 0 or is_unanswered)

    def connect(self, request: Request | None = None) -> Connection:
        request = request or self.request()
        self.note_sent(request)
        return Connection(request, self.target.timeout)

    def note_sent(self, request: Request) -> None:
        """Record that a request is sent. Until its answer is recorded, it may have an effect."""
        self.sent[request] += 1
        self.answers.setdefault(request, [])

    def note(self, answer: Answer | Exception, request: Request | None = None) -> None:
        """Record the answer to a request that was sent."""
        if isinstance(answer, Answer):
            self.answers[request or self.request()].append(answer)

    def is_shed(self, answer: Answer | Exception | None) -> bool:
        """Whether a rate limit or an overloaded server may have refused a request because of others."""
        own = {refusal.status for refusal in (self.profile.in_progress, self.profile.reused)}
        statuses = SHED - own - self.fails_with - {self.profile.unknown}
        return isinstance(answer, Answer) and answer.status in statuses

    def send(self, request: Request | None = None, *, retries: Request | None = None) -> Answer:
        """Send a request. If it is shed, wait and send it again.

        :param retries: the request that this one retries with different bytes.
        :raises NotJudgedError: there is no answer, or the server sheds all requests.
        :raises HarmError: only requests with this key are shed, or get no answer after a result.
        """
        request = request or self.request()

        def attempt() -> Answer | Exception:
            self.note_sent(retries or request)
            started = time.monotonic()
            try:
                answer = exchange(request, self.target.timeout)
            except (*WIRE_ERRORS, ValueError) as error:
                if not self.results():
                    raise NotJudgedError(f"{request.url} doesn't answer: {error!r}") from error
                return error
            self.took = time.monotonic() - started
            self.note(answer, retries or request)
            return answer

        answer = self.unless_shed(attempt)
        return answer if isinstance(answer, Answer) else self._refused_for_its_key(attempt, controls=1)

    def unless_shed(self, attempt: Callable[[], Sent]) -> Sent:
        """Attempt a request until it is not shed.

        :param attempt: sends it, and records that it was sent, and its answer.
        :raises NotJudgedError: the server sheds all requests.
        :raises HarmError: only requests with this key are shed.
        """
        deadline = time.monotonic() + self.target.patience
        tries = 0
        while self.is_shed(answer := attempt()):
            assert isinstance(answer, Answer)
            self.shed, tries = self.shed + 1, tries + 1
            wait = answer.retry_after
            if time.monotonic() + (wait or SHED_PAUSE) > deadline or (wait is None and tries >= SHED_TRIES):
                return self._refused_for_its_key(attempt)
            time.sleep(wait or SHED_PAUSE)  # as the server demands
        return answer

    def _refused_for_its_key(self, attempt: Callable[[], Answer | Exception], controls: int = CONTROLS) -> Answer:
        """Attempt the request between other operations, which show whether the server refuses those, too."""
        answer: Answer | Exception | None = None
        for _ in range(controls):
            control = Operation(self.target, self.profile)
            self.controls.append(control)
            request = control.request()
            control.note_sent(request)
            try:
                other = exchange(request, self.target.timeout)
            except WIRE_ERRORS as error:
                raise NotJudgedError(f"{request.url} doesn't answer: {error!r}") from error
            control.note(other, request)
            if not self.profile.is_result(other):
                raise NotJudgedError(f"the server sheds requests: {other}")
            answer = found = attempt()
            if isinstance(found, Answer) and not self.is_shed(found):
                return found
        seen = answer if isinstance(answer, Answer) else f"no answer: {answer!r}"
        raise HarmError(f"{controls} other operations succeeded, but this request still got {seen}", NO_END)

    def together(self, requests: list[Request]) -> tuple[list[Answer | Exception], bool]:
        """As ``exchange_together``."""
        return together([(self, request) for request in requests])

    def first(self) -> Answer:
        """The answer to the first request.

        :raises NotJudgedError: the operation doesn't succeed, so its retries can't be judged.
        """
        answer = self.send()
        if not self.profile.is_result(answer):
            raise NotJudgedError(f"the operation itself answered {answer}")
        return answer

    def settle(self, also: frozenset[int] = BUSY) -> Answer | None:
        """Retry like a client while the server is unreachable or still runs the first request.

        :param also: other statuses after which to retry.
        :returns: the last answer. None if the server didn't answer at all.
        :raises NotJudgedError: the server sheds all requests.
        :raises HarmError: only requests with this key are shed.
        """
        request = self.request()
        deadline = time.monotonic() + self.target.patience
        answer: Answer | None = None

        def attempt() -> Answer | Exception:
            self.note_sent(request)
            try:
                found = exchange(request, self.target.timeout)
            except WIRE_ERRORS as error:
                return error
            self.note(found, request)
            return found

        while True:
            pause = PAUSE
            if isinstance(found := attempt(), Answer):
                answer = found
                if answer.status not in {self.profile.in_progress.status, *also} or self.profile.is_unknown(answer):
                    return answer
                if answer.retry_after is not None:
                    pause = answer.retry_after if self.is_shed(answer) else min(answer.retry_after, LONGEST_PAUSE)
                self.shed += self.is_shed(answer)
            if time.monotonic() + pause > deadline:
                if self.is_shed(answer):
                    return self._refused_for_its_key(attempt)
                return answer
            time.sleep(pause)  # before a retry: Retry-After, or a short pause after a broken connection


def together(sent: list[tuple[Operation, Request]]) -> tuple[list[Answer | Exception], bool]:
    """As ``exchange_together``, for requests of any operations of one server."""
    for operation, request in sent:
        operation.note_sent(request)
    answers, overlapped = exchange_together([request for _, request in sent], sent[0][0].target.timeout)
    for (operation, request), answer in zip(sent, answers, strict=True):
        operation.note(answer, request)
        operation.shed += operation.is_shed(answer)
    return answers, overlapped
