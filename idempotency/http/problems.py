"""Errors as HTTP responses, with the names and statuses of the chosen profile."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Final

from django.conf import settings as django_settings
from django.http import HttpResponse

from ..conf import settings
from ..exceptions import IdempotencyError, InProgressError, OperationError, UnavailableError
from ..identity import keys
from ..options.values import ACP, IETF, STRIPE

logger: Final = logging.getLogger("idempotency")

JSON = "application/json"

#: A 401 must name a scheme (RFC 9110, section 15.5.2). Django itself knows only its session cookie, for which no scheme
#: is registered. Browsers open no dialog for this one.
CHALLENGE: Final = "Cookie"


@dataclass(frozen=True)
class Answer:
    """A profile's status and names for one problem."""

    status: int
    code: str
    type: str = ""  # the category, if the profile has categories


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The names and statuses of one convention."""

    #: The header that marks a replay. Its value is ``true``.
    replayed: str
    content_type: str
    #: Creates a problem's body from the error, its answer, and the text for the client.
    body: Callable[[IdempotencyError, Answer, str], dict[str, object]]
    #: By the codes of this package's errors.
    answers: Mapping[str, Answer]
    #: The category of an error that is not in ``answers``.
    other: str = ""
    least_retention: timedelta = timedelta(0)
    needs_key: bool = False
    #: Whether a duplicate of a running request must get 409.
    needs_conflict: bool = False
    #: Whether a 5xx must never be recorded.
    forgets_server_errors: bool = False

    def answer_to(self, error: IdempotencyError | type[IdempotencyError]) -> Answer:
        """The answer to an error. A project's own error keeps its status and code."""
        return self.answers.get(error.code) or Answer(error.status_code, error.code, self.other)


def _rfc_9457(error: IdempotencyError, answer: Answer, text: str) -> dict[str, object]:
    name, docs = error.code.removeprefix("idempotency_").replace("_", "-"), settings().problem_docs
    return {
        # A URL should lead to a page (RFC 9457, section 3.1.1), so without one the type is a URN.
        "type": f"urn:idempotency:problem:{name}" if docs is None else f"{docs}#{name}",
        "title": error.title,
        "status": answer.status,
        "detail": text,
        "code": answer.code,
        "retryable": error.retry_after is not None,
    }


def _flat(error: IdempotencyError, answer: Answer, text: str) -> dict[str, object]:
    return {"type": answer.type, "code": answer.code, "message": text}


def _enclosed(error: IdempotencyError, answer: Answer, text: str) -> dict[str, object]:
    return {"error": _flat(error, answer, text)}


#: For each problem: the status, and the categories of Stripe and of ACP.
_PROBLEMS: Mapping[str, tuple[int, str, str]] = {
    "idempotency_key_missing": (400, "invalid_request_error", "invalid_request"),
    "idempotency_key_invalid": (400, "invalid_request_error", "invalid_request"),
    "idempotency_key_expired": (400, "idempotency_error", "invalid_request"),
    "idempotency_payload_invalid": (400, "invalid_request_error", "invalid_request"),
    "idempotency_account_required": (401, "invalid_request_error", "invalid_request"),
    "idempotency_in_progress": (409, "idempotency_error", "invalid_request"),
    "idempotency_key_reused": (422, "idempotency_error", "invalid_request"),
    "idempotency_outcome_unknown": (409, "idempotency_error", "invalid_request"),
    "idempotency_body_gone": (409, "idempotency_error", "invalid_request"),
    "idempotency_lease_lost": (409, "idempotency_error", "invalid_request"),
    "idempotency_unavailable": (503, "api_error", "service_unavailable"),
    "idempotency_account_invalid": (500, "api_error", "processing_error"),
    "idempotency_payload_unreadable": (500, "api_error", "processing_error"),
    "idempotency_response_unrecordable": (500, "api_error", "processing_error"),
    "idempotency_outcome_unreadable": (500, "api_error", "processing_error"),
    "idempotency_transaction_broken": (500, "api_error", "processing_error"),
    "idempotency_outer_transaction": (500, "api_error", "processing_error"),
    "idempotency_no_transaction": (500, "api_error", "processing_error"),
    "idempotency_message_reused": (500, "api_error", "processing_error"),
}

PROFILES: Mapping[str, Profile] = {
    # draft-ietf-httpapi-idempotency-key-header-07; RFC 9457
    IETF: Profile(
        replayed="Idempotency-Replayed",
        content_type="application/problem+json",
        body=_rfc_9457,
        answers={code: Answer(status, code) for code, (status, _, _) in _PROBLEMS.items()},
    ),
    # https://docs.stripe.com/api/idempotent_requests; https://docs.stripe.com/error-codes
    STRIPE: Profile(
        replayed="Idempotent-Replayed",
        content_type=JSON,
        body=_enclosed,
        other="invalid_request_error",
        answers={
            **{code: Answer(status, code, category) for code, (status, category, _) in _PROBLEMS.items()},
            "idempotency_in_progress": Answer(409, "idempotency_key_in_use", "idempotency_error"),
            "idempotency_key_reused": Answer(400, "idempotency_key_reused", "idempotency_error"),
        },
    ),
    # Agentic Commerce Protocol, rfcs/rfc.agentic_checkout.md, sections 3.1 and 6 (of 15 June 2026)
    ACP: Profile(
        replayed="Idempotent-Replayed",
        content_type=JSON,
        body=_flat,
        other="invalid_request",
        least_retention=timedelta(hours=24),
        needs_key=True,
        needs_conflict=True,
        forgets_server_errors=True,
        answers={
            **{code: Answer(status, code, category) for code, (status, _, category) in _PROBLEMS.items()},
            "idempotency_key_missing": Answer(400, "idempotency_key_required", "invalid_request"),
            "idempotency_in_progress": Answer(409, "idempotency_in_flight", "invalid_request"),
            "idempotency_key_reused": Answer(422, "idempotency_conflict", "invalid_request"),
        },
    ),
}


def problem(error: IdempotencyError, profile: Profile) -> dict[str, object]:
    return profile.body(error, profile.answer_to(error), text_of(error))


def text_of(error: IdempotencyError) -> str:
    """The text of an error for a client. Under ``DEBUG``, it is the developers' message, as in the log."""
    return str(error) if django_settings.DEBUG else error.detail


def problem_response(error: IdempotencyError, profile: Profile) -> HttpResponse:
    status = profile.answer_to(error).status
    response = HttpResponse(json.dumps(problem(error, profile)), status=status, content_type=profile.content_type)
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    if status == HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = CHALLENGE
    return response


def response_for(error: IdempotencyError, request: Any) -> Any:
    """The response to an error of ``claim()`` that a view did not handle. Logs the error if the server is at fault."""
    report(error)
    custom = settings().error_response
    return problem_response(error, PROFILES[settings().defaults.profile]) if custom is None else custom(request, error)


def accepted_response(error: InProgressError, location: str | None = None) -> HttpResponse:
    """The 202 for a duplicate of a running operation that declares ``ACCEPTED`` or ``Attach``."""
    response = HttpResponse(
        json.dumps({"status": "in_progress", "detail": error.detail}), status=202, content_type="application/json"
    )
    response["Retry-After"] = str(error.retry_after)
    if location is not None:
        response["Location"] = location
    return response


def report(error: IdempotencyError, operation: str = "", key: str = "") -> None:
    """Log an error if the server is at fault, with the reference that the client's response contains."""
    if not isinstance(error, (OperationError, UnavailableError)):
        return
    logger.error(
        "%s answered %d (%s)%s%s: %s",
        f"Operation {operation!r}" if operation else "A claim() block",
        error.status_code,
        error.code,
        f", key {keys.shorten(key)}" if key else "",
        f", reference {error.reference}" if isinstance(error, OperationError) else "",
        error,
        exc_info=error,
    )
