"""Turns errors into HTTP responses with RFC 9457 problem details."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.http import HttpResponse

from ..conf import settings
from ..exceptions import InProgressError, OperationError, UnavailableError
from ..identity import keys

if TYPE_CHECKING:
    from ..exceptions import IdempotencyError

logger = logging.getLogger("idempotency")

CONTENT_TYPE = "application/problem+json"


def problem(error: IdempotencyError) -> dict[str, Any]:
    """The members of the problem: ``type`` and ``code`` (str), ``title``, ``status`` (int) and ``detail``.

    ``detail`` is what a client may know. Under ``DEBUG`` it is the message for developers, as in the log.
    """
    return {
        # The type is a URN, because a URL should lead to a page, and there is none (RFC 9457, section 3.1.1).
        "type": f"urn:idempotency:problem:{error.code.removeprefix('idempotency_').replace('_', '-')}",
        "title": error.title,
        "status": error.status_code,
        "detail": str(error) if django_settings.DEBUG else error.detail,
        "code": error.code,
    }


def problem_response(error: IdempotencyError) -> HttpResponse:
    """The problem as a Django response."""
    response = HttpResponse(json.dumps(problem(error)), status=error.status_code, content_type=CONTENT_TYPE)
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response


def response_for(error: IdempotencyError, request: Any) -> Any:
    """The response to an error of ``claim()`` that a view did not handle, with the project's ``ERROR_RESPONSE``.

    Call it in an exception handler of a framework. ``idempotency.http.middleware.IdempotencyErrorMiddleware`` calls it
    for every view::

        @api.exception_handler(IdempotencyError)  # django-ninja, for example
        def answer(request, error):
            return response_for(error, request)

    :param error: any ``IdempotencyError``. If the server is at fault, the error is logged.
    :param request: passed to ``ERROR_RESPONSE``, if that is set.
    :returns: the response.
    """
    report(error)
    custom = settings.error_response
    return problem_response(error) if custom is None else custom(request, error)


def accepted_response(error: InProgressError, location: str | None = None) -> HttpResponse:
    """The 202 for a duplicate of a running operation that declares ACCEPTED or attaches duplicates to a job."""
    response = HttpResponse(
        json.dumps({"status": "in_progress", "detail": error.detail}), status=202, content_type="application/json"
    )
    response["Retry-After"] = str(error.retry_after)
    if location is not None:
        response["Location"] = location
    return response


def report(error: IdempotencyError, operation: str = "", key: str = "") -> None:
    """Log an error if the server is at fault, with the reference that the client gets."""
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
