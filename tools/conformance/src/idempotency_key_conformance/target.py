"""The server under test: its URL, the requests to send, and how to count effects outside the server."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from .profiles import Profile
from .wire import WIRE_ERRORS, Answer, Connection, Request, build, exchange, exchange_together

#: Seconds between two retries without a Retry-After, and the longest wait with one.
PAUSE, LONGEST_PAUSE = 0.05, 1.0
#: The statuses after which a client retries, in addition to the profile's ``in_progress``.
BUSY = (425, 429, 502, 503, 504)
#: Header fields that identify a caller, unless ``--other-account`` names another one.
CREDENTIALS = frozenset({"authorization", "cookie", "x-api-key"})


class NotJudgedError(Exception):
    """This case can't be judged. The message gives the reason."""


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
    #: The field with which another account replaces the field of the same name.
    other_account: str | None = None
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
        if self.count_url is not None:
            try:
                text = exchange(build("GET", self.count_url, _lines(self.fields), b""), self.timeout).body.decode()
            except (*WIRE_ERRORS, ValueError) as error:
                raise NotJudgedError(f"{self.count_url} can't be read: {error!r}") from error
        else:
            text = self._run(self.count_command or "")
        if not (numbers := [int(number) for number in re.findall(r"\d+", text)]):
            raise NotJudgedError(f"the counter shows no number, but {text[:80]!r}")
        return numbers

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
        #: The answers to each request. Equal requests are one request and its retries.
        self.answers: dict[Request, list[Answer]] = {}
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
    ) -> Request:
        """
        :param keys: the values of the key's header field, which is sent once for each.
        :param account: a header field that replaces the field of the same name.
        :param is_anonymous: leave the caller's credentials out.
        """
        if keys is None:
            keys = ((f'"{self.key}"' if self.profile.quoted else self.key).encode(),)
        replaced = self.target.credentials if is_anonymous else {_name(account)} if account else set()
        fields = (
            *(line for line in self.target.fields if _name(line) not in replaced),
            *([account] if account else []),
        )
        lines = [*_lines(fields), *((self.profile.header, value) for value in keys)]
        body = self.body if body is None else body
        return build(method or self.target.method, url or self.target.url, lines, body)

    def start_counting(self) -> None:
        if self.target.is_counted:
            self._before = self.target.effects()

    def effects(self) -> int:
        """The number of effects since ``start_counting``. Without a counter, the number of different results."""
        if self.target.is_counted:
            return self.target.effects() - self._before
        return len({result.body for results in self.results().values() for result in results})

    def results(self) -> dict[Request, list[Answer]]:
        """The requests with the answers that report that the operation ran."""
        found = {
            request: [answer for answer in answers if self.profile.is_result(answer)]
            for request, answers in self.answers.items()
        }
        return {request: results for request, results in found.items() if results}

    def connect(self, request: Request | None = None) -> Connection:
        request = request or self.request()
        self.note(None, request)
        return Connection(request, self.target.timeout)

    def note(self, answer: Answer | Exception | None, request: Request | None = None) -> None:
        """Record that a request was sent, which may have an effect, and its answer."""
        known = self.answers.setdefault(request or self.request(), [])
        if isinstance(answer, Answer):
            known.append(answer)

    def send(self, request: Request | None = None, *, retries: Request | None = None) -> Answer:
        """
        :param retries: the request that this one retries with different bytes.
        :raises NotJudgedError: there is no answer.
        """
        request = request or self.request()
        self.note(None, retries or request)
        try:
            answer = exchange(request, self.target.timeout)
        except WIRE_ERRORS as error:
            raise NotJudgedError(f"{request.url} doesn't answer: {error!r}") from error
        self.note(answer, retries or request)
        return answer

    def together(self, requests: list[Request]) -> tuple[list[Answer | Exception], bool]:
        """As ``exchange_together``."""
        answers, overlapped = exchange_together(requests, self.target.timeout)
        for request, answer in zip(requests, answers, strict=True):
            self.note(answer, request)
        return answers, overlapped

    def first(self) -> Answer:
        """The answer to the first request.

        :raises NotJudgedError: the operation doesn't succeed, so its retries can't be judged.
        """
        answer = self.send()
        if not self.profile.is_result(answer):
            raise NotJudgedError(f"the operation itself answered {answer}")
        return answer

    def settle(self, also: Collection[int] = BUSY) -> Answer | None:
        """Retry like a client while the server is unreachable or still runs the first request.

        :param also: other statuses after which to retry.
        :returns: the last answer. None if the server didn't answer at all.
        """
        request = self.request()
        deadline = time.monotonic() + self.target.patience
        answer = None
        while True:
            pause = PAUSE
            try:
                answer = exchange(request, self.target.timeout)
            except WIRE_ERRORS:
                pass
            else:
                self.note(answer, request)
                if answer.status not in {self.profile.in_progress.status, *also} or self.profile.is_unknown(answer):
                    return answer
                wait = answer.field("Retry-After") or ""
                pause = min(float(wait), LONGEST_PAUSE) if wait.isdecimal() else PAUSE
            if time.monotonic() + pause > deadline:
                return answer
            time.sleep(pause)  # before a retry: Retry-After, or a short pause after a broken connection
