"""The server under test: where it is, what to send to it, and how to count its effects from outside."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from .profiles import Profile
from .wire import WIRE_ERRORS, Answer, Connection, Request, build, exchange

#: Seconds between two retries, unless the server asks for more; and the most that a retry waits.
PAUSE, LONGEST_PAUSE = 0.05, 1.0


class NotJudgedError(Exception):
    """This case can't be judged. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What the command line says of a server. Bodies may contain ``{unique}``, which is new in each operation."""

    url: str
    method: str = "POST"
    body: str
    other_body: str | None = None
    #: A body that the operation answers with 4xx, and one that it answers with 5xx.
    refused_body: str | None = None
    crashing_body: str | None = None
    other_url: str | None = None
    #: ``Name: value``, added to each request.
    fields: tuple[str, ...] = ("Content-Type: application/json",)
    #: What another account sends in place of the field of the same name.
    other_account: str | None = None
    #: An address or a command. The first number in what it answers is how many effects there were.
    count_url: str | None = None
    count_command: str | None = None
    #: How many duplicates are sent at once, one case for each number.
    duplicates: tuple[int, ...] = (2, 50, 200)
    #: The retention in seconds, if it is short enough to wait for.
    ttl: float | None = None
    #: By name: kill, restart, freeze, thaw.
    commands: Mapping[str, str] = field(default_factory=dict)
    #: How many seconds an answer may take, and how long a client goes on retrying.
    timeout: float = 30.0
    patience: float = 30.0

    def effects(self) -> int:
        """How many effects the server has had.

        :raises NotJudgedError: there is no counter, or it doesn't count.
        """
        if self.count_url is not None:
            try:
                text = exchange(build("GET", self.count_url, _lines(self.fields), b""), self.timeout).body.decode()
            except WIRE_ERRORS as error:
                raise NotJudgedError(f"{self.count_url} can't be read: {error!r}") from error
        elif self.count_command is not None:
            text = self._run(self.count_command)
        else:
            raise NotJudgedError("effects can't be counted without --count-url or --count-command")
        if (number := re.search(r"\d+", text)) is None:
            raise NotJudgedError(f"the counter shows no number, but {text[:80]!r}")
        return int(number[0])

    def strike(self, name: str) -> None:
        """Run one of the optional commands.

        :raises NotJudgedError: it was not given, or has failed.
        """
        if name not in self.commands:
            raise NotJudgedError(f"this case needs --{name}")
        self._run(self.commands[name])

    def _run(self, command: str) -> str:
        try:
            # The person who runs the suite wrote the command.
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotJudgedError(f"{command!r} failed: {error}") from error
        return done.stdout


def _lines(fields: tuple[str, ...]) -> list[tuple[str, bytes]]:
    return [(name, value.strip().encode()) for name, _, value in (line.partition(":") for line in fields)]


class Operation:
    """One logical operation: a fresh key, a body, and the effects since it was created."""

    def __init__(self, target: Target, profile: Profile, body: str | None = None, length: int = 36) -> None:
        """
        :param body: in place of the target's.
        :param length: of the key.
        """
        self.target: Final = target
        self.profile: Final = profile
        self.key: str = str(uuid4()).ljust(length, "x")
        self._unique = uuid4().hex
        self.body: bytes = self.fill(target.body if body is None else body)
        self._before: int | None = None

    def fill(self, body: str) -> bytes:
        return body.replace("{unique}", self._unique).encode()

    def request(
        self,
        *,
        body: bytes | None = None,
        keys: tuple[bytes, ...] | None = None,
        url: str | None = None,
        account: str | None = None,
    ) -> Request:
        """
        :param keys: the values of the key's header field, one for each time that it is sent.
        :param account: a header field in place of the one of the same name.
        """
        if keys is None:
            keys = ((f'"{self.key}"' if self.profile.quoted else self.key).encode(),)
        fields = self.target.fields
        if account is not None:
            name = account.partition(":")[0].lower()
            fields = (*(line for line in fields if line.partition(":")[0].lower() != name), account)
        lines = [*_lines(fields), *((self.profile.header, value) for value in keys)]
        return build(self.target.method, url or self.target.url, lines, self.body if body is None else body)

    def start_counting(self) -> None:
        self._before = self.target.effects()

    def effects(self) -> int:
        """How many effects there were since ``start_counting``."""
        assert self._before is not None
        return self.target.effects() - self._before

    def connect(self, request: Request | None = None) -> Connection:
        return Connection(request or self.request(), self.target.timeout)

    def send(self, request: Request | None = None) -> Answer:
        """:raises NotJudgedError: there is no answer."""
        request = request or self.request()
        try:
            return exchange(request, self.target.timeout)
        except WIRE_ERRORS as error:
            raise NotJudgedError(f"{request.url} doesn't answer: {error!r}") from error

    def first(self) -> Answer:
        """The answer to the first request.

        :raises NotJudgedError: the operation doesn't succeed, which says nothing about its retries.
        """
        answer = self.send()
        if not answer.succeeded:
            raise NotJudgedError(f"the operation itself answered {answer}")
        return answer

    def settle(self, request: Request | None = None) -> Answer | None:
        """Retry as a client does, while the server is unreachable, unavailable or still runs the first request.

        :returns: the last answer. None if the server didn't answer at all.
        """
        request = request or self.request()
        deadline = time.monotonic() + self.target.patience
        answer = None
        while True:
            pause = PAUSE
            try:
                answer = exchange(request, self.target.timeout)
            except WIRE_ERRORS:
                pass
            else:
                wait = answer.field("Retry-After") or ""
                if answer.status not in (self.profile.in_progress.status, 425, 429, 503) and not wait:
                    return answer
                pause = min(float(wait), LONGEST_PAUSE) if wait.isdecimal() else PAUSE
            if time.monotonic() + pause > deadline:
                return answer
            time.sleep(pause)  # before a retry: what Retry-After asks for, and a short one after a broken connection
