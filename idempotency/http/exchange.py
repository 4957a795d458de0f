"""One HTTP request under one operation: from its key to its response.

What a framework does in its own way stands in its adapter (``adapters``). Everything here is the same for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest

from ..conf import settings
from ..exceptions import (
    IdempotencyError,
    InProgressError,
    KeyMissingError,
    LeaseLostError,
    OutcomeUnreadableError,
    PayloadInvalidError,
)
from ..identity import keys
from ..identity.fingerprint import Payload
from ..identity.scope import Scope, scope_of
from ..operation import Operation
from ..options.values import ACCEPTED, Attach
from ..outcome import REPLAYED_HEADER, Outcome
from ..protocol import claims
from ..protocol.claim import Claim
from ..protocol.execution import acquire_or_wait, run
from .adapters import Adapter
from .atomic_requests import Handler
from .attempts import HandlerAttempt, attach_job, has_job, is_crash
from .problems import accepted_response, report

logger = logging.getLogger("idempotency")


class Exchange:
    """A request, the operation it is for, and the handler that would answer it unprotected.

    The key and the payload are kept in attributes and in objects whose ``repr`` hides them, never in local variables: a
    crash report shows the local variables of every frame above the handler.
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
        """Run the operation once for all its retries, and answer this one.

        Every ``IdempotencyError`` becomes a response here, except one of another claim that the handler let through:
        that is a crash of the handler, and goes where it would have gone unprotected.
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
        if response is not None:  # a handler that returned None: Django complains of it
            response[keys.HEADER] = self.meta[keys.META_NAME]  # as it was sent; it parsed, so it is harmless
        return response

    def _has_key(self) -> bool:
        if keys.META_NAME in self.meta:
            self.key = keys.parse_header(self.meta[keys.META_NAME])
        elif self.operation.required:
            raise KeyMissingError
        return bool(self.key)

    def _answer(self) -> Any:
        self.handler.refuse_open_transactions(self.operation)
        self.scope = scope_of(self.operation.name, self.operation.account(self.adapter.request), self.key)
        payload = self._payload()
        held = acquire_or_wait(self.operation, self.scope, payload)
        if isinstance(held, Outcome):
            return self._replay(held)
        try:
            return self._run(Claim(held))
        except LeaseLostError as error:
            if is_crash(self.adapter.http, error):
                raise
            logger.warning("Operation %r: attempt %d lost its lease", self.operation.name, held.attempt)
            return self._replay(claims.read_winner(held, payload))

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
            payload.request_hash  # noqa: B018 - computed here, where what can't be canonicalised is a 400
        except TypeError as error:
            # The frames that this comes from hold the payload in local variables, so they are left out of its report.
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
        response = self.adapter.replay(outcome) if outcome.reference is None else self._rebuilt(outcome.reference)
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


def is_running(operation: Operation, http: HttpRequest) -> bool:
    """Whether what this very request calls under ``operation`` is a part of what it is running already.

    It is if that is this operation, as when the handler calls ``super().create()``. It also is if both have a
    transaction: another claim could not commit in the first one's, which keeps the promises of both. DRF's
    ``partial_update()`` calls ``update()``.
    """
    running = _running(http)
    if operation.name in {known.name for known in running}:
        return True
    return bool(running) and running[-1].transaction and operation.transaction


def _running(http: HttpRequest) -> list[Operation]:
    # Kept on Django's request, which DRF wraps anew. Not in a context variable: a request made from within a handler
    # (a test client, an internal call) is another one, and its scope is its own.
    running: list[Operation] = http.__dict__.setdefault("_idempotency_running", [])
    return running
