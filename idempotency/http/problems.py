"""Errors to HTTP responses: RFC 9457 problem details."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from django.http import HttpResponse

from ..exceptions import InProgressError

if TYPE_CHECKING:
    from ..exceptions import IdempotencyError

CONTENT_TYPE = "application/problem+json"


def problem(error: IdempotencyError) -> dict[str, Any]:
    """The members of the problem: ``type`` and ``code`` (str), ``title``, ``status`` (int) and ``detail``."""
    return {
        # A URN, because a problem's type must not promise a page that isn't served (RFC 9457, section 3.1.1).
        "type": f"urn:idempotency:problem:{error.code.removeprefix('idempotency_').replace('_', '-')}",
        "title": error.title,
        "status": error.status_code,
        "detail": error.detail,
        "code": error.code,
    }


def problem_response(error: IdempotencyError) -> HttpResponse:
    response = HttpResponse(json.dumps(problem(error)), status=error.status_code, content_type=CONTENT_TYPE)
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response


def accepted_response(error: InProgressError, location: str | None = None) -> HttpResponse:
    """What a duplicate of a running operation gets where the operation declares ACCEPTED, or attaches it to a job."""
    response = HttpResponse(
        json.dumps({"status": "in_progress", "detail": error.detail}), status=202, content_type="application/json"
    )
    response["Retry-After"] = str(error.retry_after)
    if location is not None:
        response["Location"] = location
    return response
