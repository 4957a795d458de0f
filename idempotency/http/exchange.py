"""One HTTP request under one operation: from its key to its response.

``Exchange`` speaks plain Django; ``contrib.rest_framework`` has one that speaks DRF.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import BadRequest, PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.http import Http404, HttpRequest, RawPostDataException
from django.utils.datastructures import MultiValueDict

from .. import keys
from ..conf import settings
from ..exceptions import (
    IdempotencyError,
    InProgressError,
    KeyMissingError,
    LeaseLostError,
    OperationError,
    OutcomeUnreadableError,
    PayloadInvalidError,
    UnavailableError,
)
from ..fingerprint import Payload
from ..operation import Operation
from ..outcome import REPLAYED_HEADER, Outcome, outcome_of, response_of
from ..parsing import form_pairs, parse_json
from ..policy import ACCEPTED, Attach
from ..protocol import claims
from ..protocol.claims import Claim
from ..protocol.execution import Slot, acquire_or_wait, as_atomic_request, run_under
from ..protocol.faults import fault_point
from ..scope import Scope, scope_of
from .problems import accepted_response, problem_response

logger = logging.getLogger("idempotency")

#: What a handler raises to say no. Django turns them into 4xx responses, and the same request gets the same one again.
DETERMINISTIC_FAILURES = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)

#: What a job that is not over is answered with. Where the operation's own answer doesn't say when to look again, after
#: this many seconds.
RUNNING = 202
LOOK_AGAIN_AFTER = 1


class Exchange:
    """A request, the operation it is for, and the handler that would answer it unprotected."""

    def __init__(
        self, operation: Operation, request: Any, handler: Callable[[], Any], route: dict[str, object]
    ) -> None:
        self.operation = operation
        self.request = request
        #: Django's own request, of which DRF's looks up nearly everything by failing first.
        self.http: HttpRequest = getattr(request, "_request", request)
        self.meta: dict[str, Any] = self.http.META
        self.handler = handler
        self.route = route
        self.scope: Scope
        #: The body was above the limit of what is kept in memory, and finding its parts has used it up.
        self.body_is_gone = False

    # What a framework does in its own way

    def parsed_body(self) -> object:
        """The request's payload as the handler will see it, leaving the request readable for the handler.

        JSON is compared as what it says, a form by its fields, and everything else by its bytes.
        """
        content_type = self.request.content_type or ""
        if content_type == "multipart/form-data" and self._has_parts():
            return self._parts()
        body: bytes = self.request.body
        if content_type == "application/x-www-form-urlencoded":
            # The order of fields doesn't count. They stay encoded: a handler may read the body as something else, as
            # it does where a client sends JSON and calls it a form.
            return ["form", *form_pairs(body)]
        if content_type == "application/json" or content_type.endswith("+json"):
            try:
                return parse_json(body)
            except ValueError:
                pass  # malformed: the handler says so itself, and its answer belongs to these very bytes
        return body

    def _has_parts(self) -> bool:
        """Whether Django parses the parts: of a POST only, and only if it is told how long they are."""
        return self.http.method == "POST" and self.content_length() > 0

    def _parts(self) -> MultiValueDict[str, object]:
        self.keep_body_readable()
        fields: MultiValueDict[str, object] = MultiValueDict(self.request.POST)
        for name, files in self.request.FILES.lists():
            fields.setlist(name, fields.getlist(name) + files)
        return fields

    def content_length(self) -> int:
        try:
            return int(self.meta.get("CONTENT_LENGTH") or 0)
        except ValueError:
            return 0

    def keep_body_readable(self) -> None:
        """Buffer a body that fits in memory by Django's own limit, or parsing it would use its stream up."""
        limit = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        self.body_is_gone = limit is not None and self.content_length() > limit
        if not self.body_is_gone:
            # Read already, as by the check of a CSRF token: then the form is parsed, and its stream is gone anyway.
            with suppress(RawPostDataException):
                self.http.body  # noqa: B018 - reading it is what buffers it

    def rendered(self, response: Any) -> Any:
        """``response`` with its final status, headers and content."""
        if hasattr(response, "render") and not response.is_rendered:
            response = response.render()
        return response

    def response_to_failure(self, error: Exception) -> Any | None:
        """The response the framework gives to an exception of the handler, or None where it would be a crash."""
        if isinstance(error, RawPostDataException) and self.body_is_gone:
            # Unprotected, the handler would have been the first to read a body above the limit, and been told this.
            error = RequestDataTooBig("Request body exceeded settings.DATA_UPLOAD_MAX_MEMORY_SIZE.")
        if isinstance(error, DETERMINISTIC_FAILURES):
            return response_for_exception(self.http, error)
        return None

    def response_to_error(self, error: IdempotencyError) -> Any:
        return problem_response(error)

    # What is the same everywhere

    def respond(self) -> Any:
        """Run the operation once for all its retries, and answer this one. No IdempotencyError gets out of here."""
        try:
            key = self._key()
        except IdempotencyError as error:
            return self._refuse(error)
        if key is None:
            return as_atomic_request(self.handler)
        try:
            response = self._respond_to(key)
        except IdempotencyError as error:
            response = self._refuse(error)
        response[keys.HEADER] = self.meta[keys.META_NAME]  # as it was sent; it parsed, so it is harmless
        return response

    def _respond_to(self, key: str) -> Any:
        self.scope = scope_of(self.operation.name, self.operation.account(self.request), key)
        payload = self._payload()
        held = acquire_or_wait(self.operation, self.scope, payload)
        if isinstance(held, Outcome):
            return self._replay(held)
        try:
            return self._run(held)
        except LeaseLostError:
            logger.warning("Operation %r: attempt %d lost its lease", self.operation.name, held.attempt)
            return self._replay(claims.read_winner(held, payload))

    def _key(self) -> str | None:
        value = self.meta.get(keys.META_NAME)
        if value is not None:
            return keys.parse_header(value)
        if self.operation.required:
            raise KeyMissingError
        return None

    def _payload(self) -> Payload:
        try:
            command = self.command()
            payload = Payload(
                command,
                method=self.http.method or "",
                route=self.route,
                query=self.meta.get("QUERY_STRING", ""),
            )
            payload.request_hash  # noqa: B018 - computed here, where what can't be canonicalised is a 400
        except RecursionError as error:
            raise PayloadInvalidError("The payload is nested too deeply.") from error
        return payload

    def command(self) -> object:
        declared = self.operation.command
        return self.parsed_body() if declared is None else declared(self.request)

    def _run(self, claim: Claim) -> Any:
        response: Any = None

        def record_response(answer: Any, slot: Slot) -> None:
            nonlocal response
            fault_point("render.before")
            response = self.rendered(answer)
            fault_point("render.after")
            if self._is_running(response):
                claim.reference = claim.reference or response["Location"]
            if self.operation.recordable(response.status_code):
                slot.outcome = outcome_of(response, self.operation, claim.reference)

        def explain(error: Exception) -> bool:
            answer = self.response_to_failure(error)
            if answer is None:
                return False
            record_response(answer, slot)
            return True

        running = _running(self.request)
        running.add(self.operation.name)
        try:
            with run_under(claim) as slot:
                slot.explain = explain
                record_response(self.handler(), slot)
        finally:
            running.discard(self.operation.name)
        return response

    def _replay(self, outcome: Outcome) -> Any:
        response = response_of(outcome) if outcome.reference is None else self._rebuilt(outcome.reference)
        if not self._is_running(response):
            response[REPLAYED_HEADER] = "true"
        return response

    def _is_running(self, response: Any) -> bool:
        """Whether this is the answer of an operation whose job goes on. If so, it gets the job's address."""
        attach = self.operation.in_progress
        if not isinstance(attach, Attach) or response.status_code != RUNNING:
            return False
        response.setdefault("Location", attach.location(self.scope))
        response.setdefault("Retry-After", str(LOOK_AGAIN_AFTER))
        return True

    def _rebuilt(self, reference: str) -> Any:
        rebuild = self.operation.rebuild
        if rebuild is None:
            raise OutcomeUnreadableError("The recorded outcome is a reference, and the operation declares no rebuild=.")
        try:
            return self.rendered(rebuild(reference, self.request))
        except Exception as error:
            raise OutcomeUnreadableError from error

    def _refuse(self, error: IdempotencyError) -> Any:
        if isinstance(error, (OperationError, UnavailableError)):
            logger.error(
                "Operation %r answered %d (%s): %s",
                self.operation.name,
                error.status_code,
                error.code,
                error,
                exc_info=error,
            )
        if isinstance(error, InProgressError):
            answer = self.operation.in_progress
            if isinstance(answer, Attach):
                return accepted_response(error, answer.location(self.scope))
            if answer is ACCEPTED:
                return accepted_response(error)
        custom = settings.error_response
        return self.response_to_error(error) if custom is None else custom(self.request, error)


def exchange_for(operation: Operation, request: Any, handler: Callable[[], Any], route: dict[str, object]) -> Exchange:
    if getattr(request, "parser_context", None) is None:
        return Exchange(operation, request, handler, route)
    # DRF's own request, so DRF is there. Imported here, because the core runs without it.
    from ..contrib.rest_framework import RestFrameworkExchange

    return RestFrameworkExchange(operation, request, handler, route)


def is_running(operation: Operation, request: Any) -> bool:
    """Whether this very request is being run under the operation: what it calls then is part of that run."""
    return operation.name in _running(request)


def _running(request: Any) -> set[str]:
    # Kept on Django's request, which DRF wraps anew. Not in a context variable: a request made from within a handler
    # (a test client, an internal call) is another one, and its scope is its own.
    attributes: dict[str, Any] = getattr(request, "_request", request).__dict__
    running: set[str] = attributes.setdefault("_idempotency_running", set())
    return running
