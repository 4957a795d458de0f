"""Profiles: the names and statuses on the wire. ``PROFILE`` and the option ``profile`` choose one.

Every profile echoes ``Idempotency-Key``, sends ``Idempotency-Retention`` and ``Idempotency-Status``, and adds
``Retry-After`` where a retry makes sense. The tables below have all the rest: the mark of a replay, and
for each problem the status, the names and the form of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..conf import settings
from ..exceptions import IdempotencyError
from ..options.values import ACP, IETF, STRIPE

JSON = "application/json"


@dataclass(frozen=True)
class Answer:
    """How a profile names one problem."""

    status: int
    code: str
    type: str = ""
    """The category of the problem, where the profile has categories."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The names and statuses of one convention."""

    source: str
    """The text that it follows."""

    replayed: str
    """The header that marks a replay. Its value is ``true``."""

    content_type: str
    """The content type of a problem."""

    body: Callable[[IdempotencyError, Answer, str], dict[str, Any]]
    """Makes the members of a problem's body from the error, its answer, and the text for the client."""

    answers: Mapping[str, Answer]
    """The answers by the code of the error."""

    other: str = ""
    """The category of an error that ``answers`` does not have."""

    is_scoped_by_path: bool = False
    """Whether one key on two paths is two requests. Otherwise an operation has one scope, whatever its paths."""

    least_retention: timedelta = timedelta(0)
    """For how long an outcome must be kept."""

    needs_key: bool = False
    """Whether a request without a key must be refused."""

    needs_conflict: bool = False
    """Whether a duplicate of a running request must get its 409."""

    forgets_server_errors: bool = False
    """Whether a 5xx must never be recorded."""

    def answer_to(self, error: IdempotencyError | type[IdempotencyError]) -> Answer:
        """The answer to an error. A project's own error keeps its status and code."""
        return self.answers.get(error.code) or Answer(error.status_code, error.code, self.other)


#: What has become of a key, by the code of the error; "not-recorded" or "unknown" for an error that is not listed.
KEY_STATUSES: Mapping[str, str] = {
    "idempotency_in_progress": "in-progress",
    "idempotency_key_reused": "reused",
    "idempotency_outcome_unknown": "unknown",
    "idempotency_transaction_broken": "unknown",  # the operation may have committed itself, and is parked then
    "idempotency_unavailable": "unknown",
    "idempotency_body_gone": "recorded",
    "idempotency_outcome_unreadable": "recorded",
}


def _rfc_9457(error: IdempotencyError, answer: Answer, text: str) -> dict[str, Any]:
    name = error.code.removeprefix("idempotency_").replace("_", "-")
    return {
        # A URL should lead to a page (RFC 9457, section 3.1.1), so without one the type is a URN.
        "type": f"urn:idempotency:problem:{name}"
        if settings.problem_docs is None
        else f"{settings.problem_docs}#{name}",
        "title": error.title,
        "status": answer.status,
        "detail": text,
        "code": answer.code,
        "retryable": error.retry_after is not None,
    }


def _flat(error: IdempotencyError, answer: Answer, text: str) -> dict[str, Any]:
    return {"type": answer.type, "code": answer.code, "message": text}


def _enclosed(error: IdempotencyError, answer: Answer, text: str) -> dict[str, Any]:
    return {"error": _flat(error, answer, text)}


PROFILES: Mapping[str, Profile] = {
    IETF: Profile(
        source="draft-ietf-httpapi-idempotency-key-header-07; RFC 9457",
        replayed="Idempotency-Replayed",
        content_type="application/problem+json",
        body=_rfc_9457,
        answers={
            "idempotency_key_missing": Answer(400, "idempotency_key_missing"),
            "idempotency_key_invalid": Answer(400, "idempotency_key_invalid"),
            "idempotency_key_expired": Answer(400, "idempotency_key_expired"),
            "idempotency_payload_invalid": Answer(400, "idempotency_payload_invalid"),
            "idempotency_account_required": Answer(401, "idempotency_account_required"),
            "idempotency_in_progress": Answer(409, "idempotency_in_progress"),
            "idempotency_key_reused": Answer(422, "idempotency_key_reused"),
            "idempotency_outcome_unknown": Answer(409, "idempotency_outcome_unknown"),
            "idempotency_body_gone": Answer(409, "idempotency_body_gone"),
            "idempotency_lease_lost": Answer(409, "idempotency_lease_lost"),
            "idempotency_unavailable": Answer(503, "idempotency_unavailable"),
            "idempotency_response_unrecordable": Answer(500, "idempotency_response_unrecordable"),
            "idempotency_outcome_unreadable": Answer(500, "idempotency_outcome_unreadable"),
            "idempotency_transaction_broken": Answer(500, "idempotency_transaction_broken"),
            "idempotency_outer_transaction": Answer(500, "idempotency_outer_transaction"),
            "idempotency_no_transaction": Answer(500, "idempotency_no_transaction"),
            "idempotency_message_reused": Answer(500, "idempotency_message_reused"),
        },
    ),
    STRIPE: Profile(
        source="https://docs.stripe.com/api/idempotent_requests; https://docs.stripe.com/error-codes",
        replayed="Idempotent-Replayed",
        content_type=JSON,
        body=_enclosed,
        other="invalid_request_error",
        answers={
            "idempotency_key_missing": Answer(400, "idempotency_key_missing", "invalid_request_error"),
            "idempotency_key_invalid": Answer(400, "idempotency_key_invalid", "invalid_request_error"),
            "idempotency_key_expired": Answer(400, "idempotency_key_expired", "idempotency_error"),
            "idempotency_payload_invalid": Answer(400, "idempotency_payload_invalid", "invalid_request_error"),
            "idempotency_account_required": Answer(401, "idempotency_account_required", "invalid_request_error"),
            "idempotency_in_progress": Answer(409, "idempotency_key_in_use", "idempotency_error"),
            "idempotency_key_reused": Answer(400, "idempotency_key_reused", "idempotency_error"),
            "idempotency_outcome_unknown": Answer(409, "idempotency_outcome_unknown", "idempotency_error"),
            "idempotency_body_gone": Answer(409, "idempotency_body_gone", "idempotency_error"),
            "idempotency_lease_lost": Answer(409, "idempotency_lease_lost", "idempotency_error"),
            "idempotency_unavailable": Answer(503, "idempotency_unavailable", "api_error"),
            "idempotency_response_unrecordable": Answer(500, "idempotency_response_unrecordable", "api_error"),
            "idempotency_outcome_unreadable": Answer(500, "idempotency_outcome_unreadable", "api_error"),
            "idempotency_transaction_broken": Answer(500, "idempotency_transaction_broken", "api_error"),
            "idempotency_outer_transaction": Answer(500, "idempotency_outer_transaction", "api_error"),
            "idempotency_no_transaction": Answer(500, "idempotency_no_transaction", "api_error"),
            "idempotency_message_reused": Answer(500, "idempotency_message_reused", "api_error"),
        },
    ),
    ACP: Profile(
        source="Agentic Commerce Protocol, rfcs/rfc.agentic_checkout.md, sections 3.1 and 6 (of 15 June 2026)",
        replayed="Idempotent-Replayed",
        content_type=JSON,
        body=_flat,
        other="invalid_request",
        is_scoped_by_path=True,
        least_retention=timedelta(hours=24),
        needs_key=True,
        needs_conflict=True,
        forgets_server_errors=True,
        answers={
            "idempotency_key_missing": Answer(400, "idempotency_key_required", "invalid_request"),
            "idempotency_key_invalid": Answer(400, "idempotency_key_invalid", "invalid_request"),
            "idempotency_key_expired": Answer(400, "idempotency_key_expired", "invalid_request"),
            "idempotency_payload_invalid": Answer(400, "idempotency_payload_invalid", "invalid_request"),
            "idempotency_account_required": Answer(401, "idempotency_account_required", "invalid_request"),
            "idempotency_in_progress": Answer(409, "idempotency_in_flight", "invalid_request"),
            "idempotency_key_reused": Answer(422, "idempotency_conflict", "invalid_request"),
            "idempotency_outcome_unknown": Answer(409, "idempotency_outcome_unknown", "invalid_request"),
            "idempotency_body_gone": Answer(409, "idempotency_body_gone", "invalid_request"),
            "idempotency_lease_lost": Answer(409, "idempotency_lease_lost", "invalid_request"),
            "idempotency_unavailable": Answer(503, "idempotency_unavailable", "service_unavailable"),
            "idempotency_response_unrecordable": Answer(500, "idempotency_response_unrecordable", "processing_error"),
            "idempotency_outcome_unreadable": Answer(500, "idempotency_outcome_unreadable", "processing_error"),
            "idempotency_transaction_broken": Answer(500, "idempotency_transaction_broken", "processing_error"),
            "idempotency_outer_transaction": Answer(500, "idempotency_outer_transaction", "processing_error"),
            "idempotency_no_transaction": Answer(500, "idempotency_no_transaction", "processing_error"),
            "idempotency_message_reused": Answer(500, "idempotency_message_reused", "processing_error"),
        },
    ),
}

#: The headers by which a replay of some profile is known.
REPLAYED_HEADERS = frozenset(profile.replayed for profile in PROFILES.values())
