"""One call of ``assert_idempotent``: ``Trial`` sends requests and counts effects, ``Report`` holds the findings."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any
from unittest.mock import patch

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import Client

from .. import foreign
from ..http.problems import PROFILES
from ..identity import keys
from ..models import IdempotencyRecord
from ..operation import Operation, registry
from ..protocol import faults
from ..store import records_database

#: How long the threads of a check wait for each other, in seconds. A test machine may be busy.
THREADS_WAIT = 60

PROTECT = (
    "Protect the view: @idempotent(…) closest to the function or method, or IdempotentMixin with "
    "idempotent_operations. If it is protected, check that methods= and recordable= fit this request and response."
)


class Broken(Exception):  # noqa: N818 - a finding, not an error
    """A check's finding: a promise is broken. ``what`` describes it, and ``advice`` how to correct it."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice


class NotRun(Exception):  # noqa: N818 - a finding, not an error
    """A check's finding: it could not be run."""


@dataclass
class Report:
    """The findings of ``assert_idempotent`` about one request. ``str()`` formats them for reading."""

    #: The method and the path.
    request: str
    #: The names of the checks that passed.
    kept: list[str] = field(default_factory=list)
    #: The broken promises by check, each with ``what`` happened and ``advice`` how to correct it.
    broken: dict[str, Broken] = field(default_factory=dict)
    #: The checks that could not be run, by name, with reasons.
    not_run: dict[str, str] = field(default_factory=dict)
    #: The names of the checks that the caller left out.
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = len(self.broken)
        lines = [f"{self.request} is not safe to retry: {count} of its promises broke." if count else self.request]
        advised: dict[str, str] = {}
        for name, finding in self.broken.items():
            earlier = advised.setdefault(finding.advice, name)
            advice = finding.advice if earlier == name else f"As for {earlier}."
            lines += ["", f"{name}: {finding.what}", f"    {advice}"]
        for title, names in (("Kept", self.kept), ("Left out", self.left_out)):
            if names:
                lines += ["", f"{title}: {', '.join(names)}"]
        if self.not_run:
            lines += ["", "Not run:", *(f"  {name}: {reason}" for name, reason in self.not_run.items())]
        return "\n".join(lines)


class Request:
    """A request that a test client can send again.

    :param method: the HTTP method.
    :param path: the path, with the query.
    :param data: the payload, as the client's ``post()`` takes it.
    :param options: more arguments of the client's ``post()``, such as ``content_type="application/json"``, or
        ``format="json"`` for Django REST framework's client.

    If the operation does not read its key from the header, pass a callable as ``data`` or ``headers`` that takes the
    key and returns the value: ``data=lambda key: {"id": key}``.
    """

    def __init__(self, method: str, path: str, data: Any = None, **options: Any) -> None:
        self.method: str = method.upper()
        self.path = path
        self.data = data
        self.options = options

    def __repr__(self) -> str:
        return f"{self.method} {self.path}"

    def with_data(self, data: Any) -> Request:
        return Request(self.method, self.path, data, **self.options)

    def send(self, client: Client, key: str) -> Answer:
        send = getattr(client, self.method.lower())
        given = {"headers": {}, **self.options, "data": self.data}
        options = {name: value(key) if callable(value) else value for name, value in given.items()}
        options["headers"] = {**options["headers"], keys.HEADER: key}
        return Answer.of(send(self.path, **{**options, "data": _with_files(options["data"])}))


#: Held while a file is read, because threads send the same file.
_reading = threading.Lock()


def _with_files(data: Any) -> Any:
    """The payload with a copy of each file, because sending a file reads it to its end."""
    if isinstance(data, dict):
        return {name: _with_files(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_with_files(value) for value in data]
    if not hasattr(data, "seek"):
        return data
    with _reading:
        data.seek(0)
        copied = BytesIO(data.read())
    vars(copied).update({name: getattr(data, name) for name in ("name", "content_type") if hasattr(data, name)})
    return copied


@dataclass(frozen=True)
class Answer:
    """The parts of a response that a check compares."""

    status: int
    content_type: str
    location: str
    body: bytes = field(repr=False)
    is_replay: bool = field(compare=False)

    @classmethod
    def of(cls, response: Any) -> Answer:
        return cls(
            response.status_code,
            response.headers.get("Content-Type", ""),
            response.headers.get("Location", ""),
            response.getvalue(),
            any(profile.replayed in response.headers for profile in PROFILES.values()),
        )

    def __str__(self) -> str:
        return f"{self.status} {self.body[:200].decode(errors='replace')!r}".rstrip()

    @property
    def succeeded(self) -> bool:
        return self.status < 400

    @property
    def failed(self) -> bool:
        """Whether the server is at fault. A record that can't be written at the moment does not count."""
        return self.status >= 500 and self.problem != "idempotency_unavailable"

    @property
    def problem(self) -> str:
        """The code of a problem from this package, or ""."""
        with suppress(ValueError, AttributeError):
            code = json.loads(self.body).get("code")
            if isinstance(code, str) and code.startswith("idempotency_"):
                return code
        return ""


@dataclass
class Trial:
    """One call of ``assert_idempotent``."""

    client: Client
    make_request: Callable[[], Request]
    effects: Callable[[], int]
    other_client: Client | None
    other_payload: Any
    revoke: Callable[[], object] | None
    threads: int
    #: The number of effects of the first request. Every other request must have the same number or none.
    once: int = 0
    operation: Operation | None = None

    def begin(self) -> Request:
        """Send the first request, to determine its operation and the number of its effects.

        :raises AssertionError: the request fails or has no effect, so repeating it would prove nothing.
        """
        request, key, before = self.make_request(), keys.new_key(), self.effects()
        # With the client's own raise_request_exception, so that the test gets the view's error.
        answer = request.send(_copy(self.client), key)
        self.once = self.effects() - before
        if answer.failed and self.once > 0:
            raise AssertionError(
                f"{request} was answered {answer} although it took effect. A server error is not recorded, so a retry "
                f"takes effect again. Write in the record's transaction, which an error rolls back, or return the "
                f"outcome."
            )
        if not answer.succeeded or self.once < 1:
            raise AssertionError(
                f"{request} was answered {answer}, and `effects` counted {self.once} effects. Pass a request that "
                f"succeeds, and count its effects where they happen. In a TestCase, on_commit() callbacks don't run."
            )
        record = self.find_record(key)
        self.operation = None if record is None else registry.get(record.operation)
        return request

    def first(self) -> tuple[Request, str, Answer, int]:
        """Send a request under a new key, for a check that repeats it.

        :returns: the request, its key, its answer, and the number of effects before.
        :raises NotRun: it is refused or has no effect, although its key is new.
        """
        request, key, before = self.make_request(), keys.new_key(), self.effects()
        answer = self.send(request, key)
        if not answer.succeeded or self.effects() - before != self.once:
            raise refused(answer)
        return request, key, answer, before

    def send(self, request: Request, key: str, client: Client | None = None) -> Answer:
        """Send the request. An error of the view is a 500, as for a client."""
        sender = _copy(client or self.client)
        sender.raise_request_exception = False
        return request.send(sender, key)

    def send_and_crash(self, request: Request, key: str, place: str) -> Answer | None:
        """Send the request and kill it at a fault point, or before callbacks of ``on_commit()``.

        :returns: None if it died, or the answer if it did not reach the fault point.
        """
        with (
            patch.dict(faults.fault_point, {place: _crash}),
            patch.object(BaseDatabaseWrapper, foreign.RUN_CALLBACKS, _crash_before_callbacks),
            suppress(SimulatedCrashError),
        ):
            return self.send(request, key)
        return None

    def at_once(self, request: Request, key: str) -> list[Answer]:
        """Send the request from several threads, each with its own connections."""
        start = threading.Barrier(self.threads)

        def send() -> Answer:
            try:
                start.wait(THREADS_WAIT)
                return self.send(request, key)
            finally:
                connections.close_all()

        with ThreadPoolExecutor(self.threads) as pool:
            return [sending.result(THREADS_WAIT) for sending in [pool.submit(send) for _ in range(self.threads)]]

    def times(self, effects_before: int) -> str:
        """The number of effects since then, for a message."""
        return f"{self.effects() - effects_before} effects instead of {self.once}"

    def expect_once(self, effects_before: int, what: str, advice: str) -> None:
        """:raises Broken: the effects since then are not exactly one request's."""
        if self.effects() - effects_before != self.once:
            raise Broken(f"{what} ({self.times(effects_before)}).", advice)

    def expect_replay(self, first: Answer, answer: Answer, what: str) -> None:
        """:raises Broken: ``answer`` differs from the first request's answer."""
        is_same = answer == first
        if self.operation is not None and self.operation.policy.rebuild is not None:
            is_same = answer.succeeded  # the answer is rebuilt, and may show a later state of a job
        elif self.operation is not None and self.operation.policy.redact is not None:
            is_same = replace(answer, body=first.body) == first  # the replay has the redacted body
        if not is_same:
            raise Broken(
                f"{what} was answered {answer} instead of {first}, the recorded answer.",
                f"Put every decorator that changes the answer below @idempotent. {PROTECT}",
            )

    def find_record(self, key: str) -> IdempotencyRecord | None:
        return IdempotencyRecord.objects.using(records_database()).filter(idempotency_key=key).first()

    @property
    def keeps_transaction(self) -> bool:
        """Whether the operation declares that its effects are in the record's transaction."""
        return self.operation is None or self.operation.policy.transaction


class SimulatedCrashError(BaseException):
    """Ends a request like the death of its process: no error handler catches it."""


def _crash() -> None:
    raise SimulatedCrashError


_run_callbacks = getattr(BaseDatabaseWrapper, foreign.RUN_CALLBACKS)


def _crash_before_callbacks(connection: BaseDatabaseWrapper) -> None:
    """Die between a COMMIT and the callbacks of ``on_commit()``, which then never run."""
    if foreign.on_commit_callbacks(connection):
        foreign.set_on_commit_callbacks(connection, [])
        _crash()
    _run_callbacks(connection)


def refused(answer: Answer) -> NotRun:
    return NotRun(
        f"it needs a request that takes effect under a new key, but that was answered {answer}. If the payload must be "
        f"unique, pass a callable that makes the request."
    )


def changed(payload: Any) -> Any:
    """The payload with every value changed and every name kept.

    :raises NotRun: it has no value to change, or it is made from the key.
    """
    if callable(payload):
        raise NotRun("the payload contains the key. Pass other_payload=")
    other = _changed(payload)
    if other == payload:
        raise NotRun("the request has no payload that could be changed. Pass other_payload=")
    return other


def _changed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _changed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_changed(each) for each in value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value}1" if isinstance(value, str) else value


def _copy(client: Client) -> Client:
    """A copy with separate cookies, for use in a thread."""
    copied = copy.copy(client)
    copied.cookies = copy.deepcopy(client.cookies)
    return copied
