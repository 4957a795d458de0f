"""The handler of one request as an attempt of its operation: called, rendered, taken down."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.http.response import HttpResponseBase

from ..exceptions import IdempotencyError, UnrecordableResponseError
from ..identity.scope import Scope
from ..operation import Operation
from ..options.values import Attach
from ..outcome import Outcome, outcome_of
from ..protocol.claim import Claim
from ..protocol.faults import fault_point
from ..protocol.ownership import on_behalf_of
from .adapters import Adapter
from .atomic_requests import Handler

#: What a job that is not over is answered with. If the operation's own answer doesn't say when to look again, the
#: client is told to do so after this many seconds.
RUNNING = 202
LOOK_AGAIN_AFTER = 1


class HandlerAttempt:
    """One run of a handler. ``response`` is what its client is answered, once the handler has been called."""

    def __init__(self, claim: Claim, adapter: Adapter, handler: Handler) -> None:
        self.claim = claim
        self.adapter = adapter
        self.handler = handler
        self.response: Any = None

    def call(self) -> Outcome | None:
        """Run the handler.

        :returns: the outcome to record, or None if nothing of this run is to be kept.
        :raises UnrecordableResponseError: the handler's answer should be recorded, and can't be.
        """
        with self.handler.transactions_besides(self.claim.using, self.claim.operation) as others:
            try:
                answer = self.handler()
            except IdempotencyError as error:
                if error.raised_by is not self.claim.ownership:
                    note_crash(self.adapter.http, error)
                raise
            # Django itself says what it thinks of a view that returns None. DRF does when it finalizes the response.
            outcome = self._take_down(answer)
            others.status = None if outcome is None else outcome.status
            # They commit now. What comes after them may fail and roll back the record's own transaction only.
            self.claim.ownership.has_effects_elsewhere = bool(others.databases) and outcome is not None
        return outcome

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """What is to be recorded of an exception out of ``call``, whose writes have been rolled back.

        :returns: the outcome of the framework's answer to it, or None if that answer is not to be kept.
        :raises Exception: ``error`` itself, if it is a crash.
        """
        self.discard()
        answer = self.adapter.answer_to_exception(error)
        if answer is None:
            raise error
        return self._take_down(answer)

    def discard(self) -> None:
        """Free what an answer holds that no client will be sent, such as an open file."""
        _free(self.response)
        self.response = None

    def _take_down(self, answer: Any) -> Outcome | None:
        with on_behalf_of(self.claim.ownership):
            return self._outcome_of(answer)

    def _outcome_of(self, answer: Any) -> Outcome | None:
        operation = self.claim.operation
        fault_point("render.before")
        self.response = answer  # what was opened for it is closed, also if it can't be rendered
        self.response = self.adapter.render(answer)
        fault_point("render.after")
        if self.response is None:
            return None
        if not isinstance(self.response, HttpResponseBase):
            raise UnrecordableResponseError(
                f"The handler of operation {operation.name!r} must return an HttpResponse, not "
                f"{type(self.response).__name__}. If a framework makes the response of what the handler returns, put "
                f"@idempotent where the response is made, or register an adapter for the framework."
            )
        if has_job(operation, self.response):
            attach_job(operation, self.claim.scope, self.response)
            self.claim.reference = self.claim.reference or self.response["Location"]
        if not operation.recordable(self.response.status_code):
            return None
        return outcome_of(self.adapter.form_to_record(self.response), operation, self.claim.reference)


def _free(answer: Any) -> None:
    if isinstance(answer, HttpResponseBase):
        # Not response.close(), which would also tell the whole process that the request is over.
        closers = [*answer._resource_closers]  # type: ignore[attr-defined]
    else:
        closers = [answer.close] if hasattr(answer, "close") else []  # such as a coroutine that nobody awaits
    for close in closers:
        with suppress(Exception):  # as Django does: nobody waits for the answer any more
            close()


_CRASH = "_idempotency_crash"


def note_crash(http: Any, error: IdempotencyError) -> None:
    """Remember on Django's request that the handler let ``error`` through, which is not for its client.

    It comes from another claim, such as a ``claim()`` block that was busy, and says nothing of this request.
    """
    setattr(http, _CRASH, error)


def is_crash(http: Any, error: Exception) -> bool:
    return getattr(http, _CRASH, None) is error


def has_job(operation: Operation, response: Any) -> bool:
    """Whether ``response`` is the answer of an operation whose job goes on."""
    return isinstance(operation.in_progress, Attach) and response.status_code == RUNNING


def attach_job(operation: Operation, scope: Scope, response: Any) -> None:
    """Tell the client where the job of ``operation`` is, and when to look again."""
    attach = operation.in_progress
    assert isinstance(attach, Attach)  # has_job() said so
    response.setdefault("Location", attach.location(scope))
    response.setdefault("Retry-After", str(LOOK_AGAIN_AFTER))
