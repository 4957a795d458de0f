"""Turns errors into HTTP responses, in the form of a profile: RFC 9457 problem details, unless another is chosen."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.http import HttpResponse

from ..conf import settings
from ..exceptions import InProgressError, OperationError, UnavailableError
from ..identity import keys
from .profiles import PROFILES, Profile

if TYPE_CHECKING:
    from ..exceptions import IdempotencyError

logger = logging.getLogger("idempotency")


def problem(error: IdempotencyError, profile: Profile) -> dict[str, Any]:
    """The members of a problem's body."""
    return profile.body(error, profile.answer_to(error), text_of(error))


def text_of(error: IdempotencyError) -> str:
    """What a client may know of an error. Under ``DEBUG`` it is the message for developers, as in the log."""
    return str(error) if django_settings.DEBUG else error.detail


def problem_response(error: IdempotencyError, profile: Profile) -> HttpResponse:
    """The problem as a Django response."""
    status = profile.answer_to(error).status
    response = HttpResponse(json.dumps(problem(error, profile)), status=status, content_type=profile.content_type)
    if error.retry_after is not None:
        response["Retry-After"] = str(error.retry_after)
    return response


def response_for(error: IdempotencyError, request: Any) -> Any:
    """The response to an error of ``claim()`` that a view did not handle, with the project's ``ERROR_RESPONSE``.

    Call it in an exception handler of a framework. ``idempotency.http.middleware.IdempotencyMiddleware`` calls it
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
    return problem_response(error, PROFILES[settings.profile]) if custom is None else custom(request, error)


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
