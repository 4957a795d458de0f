"""The handler of one request as an attempt of its operation: it is called, its response rendered, its outcome taken."""

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

#: The status of a response while the job runs. If the response has no Retry-After, it gets this many seconds.
RUNNING = 202
LOOK_AGAIN_AFTER = 1


class HandlerAttempt:
    """One run of a handler. After it, ``response`` is the response for its client."""

    def __init__(self, claim: Claim, adapter: Adapter, handler: Handler) -> None:
        self.claim = claim
        self.adapter = adapter
        self.handler = handler
        self.response: Any = None

    def call(self) -> Outcome | None:
        """Run the handler.

        :returns: the outcome to record, or None if nothing of this run is kept.
        :raises UnrecordableResponseError: the handler's response must be recorded, but can't be.
        """
        with self.handler.transactions_besides(self.claim.using, self.claim.operation) as others:
            try:
                answer = self.handler()
            except IdempotencyError as error:
                if error.raised_by is not self.claim.ownership:
                    note_crash(self.adapter.http, error)
                raise
            outcome = self._take_down(answer)
            others.status = None if outcome is None else outcome.status
            # The other transactions commit now. A later failure rolls back only the record's transaction.
            self.claim.ownership.has_effects_elsewhere = bool(others.databases) and outcome is not None
        return outcome

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """Turn an exception of ``call``, whose writes have been rolled back, into an outcome.

        :returns: the outcome of the framework's response to it, or None if that response is not recorded.
        :raises Exception: ``error`` itself, if it is a crash.
        """
        self.discard()
        answer = self.adapter.answer_to_exception(error)
        if answer is None:
            raise error
        return self._take_down(answer)

    def discard(self) -> None:
        """Free the resources of a response that is not sent, such as an open file."""
        _free(self.response)
        self.response = None

    def _take_down(self, answer: Any) -> Outcome | None:
        with on_behalf_of(self.claim.ownership):
            return self._outcome_of(answer)

    def _outcome_of(self, answer: Any) -> Outcome | None:
        operation = self.claim.operation
        fault_point("render.before")
        self.response = answer  # so that discard() frees it even if rendering fails
        self.response = self.adapter.render(answer)
        fault_point("render.after")
        if not isinstance(self.response, HttpResponseBase):
            raise UnrecordableResponseError(
                f"The handler of operation {operation.name!r} must return an HttpResponse, not "
                f"{type(self.response).__name__}. If a framework makes the response from what the handler returns, put "
                f"@idempotent where the response exists, or register an adapter for the framework."
            )
        if has_job(operation, self.response):
            attach_job(operation, self.claim.scope, self.response)
            self.claim.reference = self.claim.reference or self.response["Location"]
        if not operation.recordable(self.response.status_code):
            return None
        return outcome_of(self.adapter.form_to_record(self.response), operation, self.claim.reference)


def _free(answer: Any) -> None:
    if isinstance(answer, HttpResponseBase):
        # Not response.close(), because that also sends the signal request_finished.
        closers = [*answer._resource_closers]  # type: ignore[attr-defined]
    else:
        closers = [answer.close] if hasattr(answer, "close") else []  # for example a coroutine that is never awaited
    for close in closers:
        with suppress(Exception):  # as Django does, because the response is not sent any more
            close()


_CRASH = "_idempotency_crash"


def note_crash(http: Any, error: IdempotencyError) -> None:
    """Remember on Django's request that ``error`` is a crash of the handler and no answer to this request.

    The error belongs to another claim, for example to a ``claim()`` block that was in progress elsewhere.
    """
    setattr(http, _CRASH, error)


def is_crash(http: Any, error: Exception) -> bool:
    return getattr(http, _CRASH, None) is error


def has_job(operation: Operation, response: Any) -> bool:
    """Whether ``response`` says that the operation's job is still running."""
    return isinstance(operation.in_progress, Attach) and response.status_code == RUNNING


def attach_job(operation: Operation, scope: Scope, response: Any) -> None:
    """Tell the client where the job of ``operation`` is, and when to look again."""
    attach = operation.in_progress
    assert isinstance(attach, Attach)  # the caller has checked has_job()
    response.setdefault("Location", attach.location(scope))
    response.setdefault("Retry-After", str(LOOK_AGAIN_AFTER))
