"""One HTTP request of one operation: from its key to its response.

What each framework does in its own way is in its adapter (``adapters``). Everything else is here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest

from ..conf import settings
from ..exceptions import (
    BodyGoneError,
    IdempotencyError,
    InProgressError,
    LeaseLostError,
    OutcomeUnreadableError,
    PayloadInvalidError,
)
from ..identity import keys
from ..identity.fingerprint import Payload
from ..identity.scope import Scope, scope_of
from ..operation import Operation
from ..options.values import ACCEPTED, Attach
from ..outcome import REPLAYED_HEADER, RETENTION_HEADER, Outcome
from ..protocol import claims
from ..protocol.claim import Claim
from ..protocol.execution import acquire_or_wait, run
from ..protocol.lateness import refusal_to_begin
from .adapters import Adapter
from .atomic_requests import Handler
from .attempts import HandlerAttempt, attach_job, has_job, is_crash
from .key_sources import key_of_request, missing_key
from .problems import accepted_response, report

logger = logging.getLogger("idempotency")


class Exchange:
    """A request, its operation, and its unprotected handler.

    The key and the payload are kept in attributes and in objects whose ``repr`` hides them, and never in local
    variables, because a crash report shows the local variables of every frame above the handler.
    """

    def __init__(
        self, operation: Operation, adapter: Adapter, handler: Handler, route: Callable[[], dict[str, object]]
    ) -> None:
        self.operation = operation
        self.adapter = adapter
        self.handler = handler
        self.route = route
        self.meta: dict[str, Any] = adapter.http.META
        self.key: str = ""
        self.scope: Scope

    def respond(self) -> Any:
        """Answer the request: run the operation, or replay its outcome, or refuse.

        Every ``IdempotencyError`` becomes a response here, except for an error of another claim that the handler did
        not handle. That is a crash of the handler and propagates as it would from an unprotected view.
        """
        try:
            if not self._has_key():
                return self.handler.pass_through()
        except IdempotencyError as error:
            return self._refuse(error)
        try:
            response = self._answer()
        except IdempotencyError as error:
            if is_crash(self.adapter.http, error):
                raise
            response = self._refuse(error)
        self._add_headers(response)
        return response

    def replay_or_raise(self, refusal: Exception) -> Any:
        """Answer a request that the framework has refused: replay its outcome, if one is recorded.

        Nothing is claimed and nothing runs.

        :raises Exception: ``refusal``, if the request has no key or would not be answered by a replay.
        """
        try:
            outcome = self._recorded_outcome()
            response = None if outcome is None else self._replay(outcome)
        except IdempotencyError as error:
            report(error, self.operation.name, self.key)
            response = None
        if response is None:
            raise refusal
        self._add_headers(response)
        return response

    def _recorded_outcome(self) -> Outcome | None:
        if not self._has_key():
            return None
        self.scope = self._scope()
        return claims.recorded_outcome(self.operation, self.scope, self._payload())

    def _add_headers(self, response: Any) -> None:
        for name, value in self.adapter.headers.items():
            response[name] = value

    def _has_key(self) -> bool:
        self.key = key_of_request(self.operation, self.adapter) or ""
        if not self.key and self.operation.required:
            raise missing_key(self.operation)
        # As it was sent, if it was sent in the header. That is harmless because it is valid.
        self.adapter.headers = {
            keys.HEADER: self.meta.get(keys.META_NAME) or keys.format_header(self.key),
            RETENTION_HEADER: str(int(self.operation.ttl.total_seconds())),
        }
        return bool(self.key)

    def _answer(self) -> Any:
        self.handler.refuse_open_transactions(self.operation)
        self.scope = self._scope()
        payload = self._payload()
        held = acquire_or_wait(self.operation, self.scope, payload, refusal_to_begin(self.operation, self.key))
        if isinstance(held, Outcome):
            return self._replay(held)
        try:
            return self._run(Claim(held))
        except LeaseLostError as error:
            if is_crash(self.adapter.http, error):
                raise
            logger.warning("Operation %r: attempt %d lost its lease", self.operation.name, held.attempt)
            return self._replay(claims.read_winner(held, payload))

    def _scope(self) -> Scope:
        return scope_of(self.operation.name, self.operation.account(self.adapter.request), self.key)

    def _payload(self) -> Payload:
        try:
            payload = Payload(
                self.adapter.payload(self.operation),
                method=self.adapter.http.method or "",
                route=self.route(),
                query=self.meta.get("QUERY_STRING", ""),
            )
        except RecursionError as error:
            raise PayloadInvalidError("The payload is nested too deeply.") from error
        try:
            payload.request_hash  # noqa: B018 - computed here, where an error becomes a 400
        except TypeError as error:
            # Raise a new error, because the frames of this one hold the payload in local variables.
            raise TypeError(str(error)) from None
        return payload

    def _run(self, claim: Claim) -> Any:
        attempt = HandlerAttempt(claim, self.adapter, self.handler)
        running = _running(self.adapter.http)
        running.append(self.operation)
        try:
            run(claim, attempt)
        except BaseException:
            attempt.discard()
            raise
        finally:
            running.pop()
        return attempt.response

    def _replay(self, outcome: Outcome) -> Any:
        if outcome.is_body_gone and (outcome.reference is None or self.operation.rebuild is None):
            raise BodyGoneError(
                f"The request with this Idempotency-Key has completed with status {outcome.status}, and its response "
                f"is no longer kept. It does not run again."
            )
        if outcome.reference is not None and (outcome.body is None or outcome.is_body_gone):
            response = self._rebuilt(outcome.reference)
        else:
            response = self.adapter.replay(outcome)
        if has_job(self.operation, response):
            attach_job(self.operation, self.scope, response)
        else:
            response[REPLAYED_HEADER] = "true"
        return response

    def _rebuilt(self, reference: str) -> Any:
        rebuild = self.operation.rebuild
        if rebuild is None:
            raise OutcomeUnreadableError("The recorded outcome is a reference, and the operation declares no rebuild=.")
        try:
            return self.adapter.render(rebuild(reference, self.adapter.request))
        except Exception as error:
            raise OutcomeUnreadableError from error

    def _refuse(self, error: IdempotencyError) -> Any:
        report(error, self.operation.name, self.key)
        if isinstance(error, InProgressError):
            answer = self.operation.in_progress
            if isinstance(answer, Attach):
                return accepted_response(error, answer.location(self.scope))
            if answer is ACCEPTED:
                return accepted_response(error)
        custom = settings.error_response
        return self.adapter.answer_to_error(error) if custom is None else custom(self.adapter.request, error)


_REFUSED = "_idempotency_refused"


def refuse_unless_recorded(http: HttpRequest, refusal: Exception) -> None:
    """Answer the request by a recorded outcome only. For a framework that refuses a request before its handler.

    Call it only if the request goes to a protected handler. The handler then raises ``refusal``, unless it can replay.
    """
    setattr(http, _REFUSED, refusal)


def refusal_of(http: HttpRequest) -> Exception | None:
    """The error with which the framework has refused the request, unless there is a recorded outcome."""
    refusal: Exception | None = getattr(http, _REFUSED, None)
    return refusal


def is_running(operation: Operation, http: HttpRequest) -> bool:
    """Whether a call under ``operation`` is a part of an operation that this request is already running.

    It is, if the request runs this operation, as when the handler calls ``super().create()``. It also is, if both
    operations have ``transaction=True``, as when DRF's ``partial_update()`` calls ``update()``. A second claim could
    not commit inside the first one's transaction, and that transaction keeps the promises of both.
    """
    running = _running(http)
    if operation.name in {known.name for known in running}:
        return True
    return bool(running) and running[-1].transaction and operation.transaction


def _running(http: HttpRequest) -> list[Operation]:
    # Kept on Django's request, because DRF may make several wrappers of it. A context variable would be wrong, because
    # a request that a handler sends (by a test client or an internal call) is another request with a scope of its own.
    running: list[Operation] = http.__dict__.setdefault("_idempotency_running", [])
    return running
