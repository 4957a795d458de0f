"""The headers that report the status of a request's key, and what an exchange leaves on its request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from django.http import HttpRequest

from ..identity import keys
from ..operation import Policy

#: For how many seconds the operation keeps an outcome after recording it.
RETENTION_HEADER: Final = "Idempotency-Retention"
#: The status of the request's key.
STATUS_HEADER: Final = "Idempotency-Status"


class Reached(Enum):
    """How far a request with a key came, and the status of its key if no error changes it.

    Numbered, because two members of equal values would be one.
    """

    NOTHING = 1, "unknown"  # the record was not looked up
    NO_PROTECTION = 2, "ignored"  # nothing looks up the key, and the handler runs at each request
    ATTEMPT = 3, "not-recorded"  # the handler ran, and nothing of it is kept
    UNKNOWN_EFFECT = 4, "unknown"  # the handler ran, and its effects outside of the transaction are unknown
    COMMIT = 5, "executed"  # the handler ran, and its outcome is committed
    OUTCOME = 6, "recorded"  # there is an outcome, and the caller did not get it
    JOB = 7, "in-progress"  # the outcome is a job, which is still running
    REPLAY = 8, "replayed"  # the caller got the outcome

    def __init__(self, place: int, status: str) -> None:
        self.status = status


#: By the code of an error. Other errors don't reveal anything about the record.
_BY_CODE: Final[Mapping[str, str]] = {
    "idempotency_key_missing": "not-recorded",
    "idempotency_key_expired": "not-recorded",  # a recorded key never expires
    "idempotency_in_progress": "in-progress",
    "idempotency_key_reused": "reused",
    "idempotency_outcome_unknown": "unknown",
    "idempotency_lease_lost": "unknown",
    "idempotency_transaction_broken": "unknown",  # the operation may have committed itself, and is then parked
    "idempotency_unavailable": "unknown",
    "idempotency_body_gone": "recorded",
    "idempotency_outcome_unreadable": "recorded",
}

STATUSES: Final = frozenset({*(reached.status for reached in Reached), *_BY_CODE.values()})


def key_status(reached: Reached, code: str | None = None) -> str:
    """The value of ``Idempotency-Status``.

    :param code: the code of the error with which the request ended, if one did.
    """
    if code is None or reached is Reached.OUTCOME:  # no later error makes it untrue that there is an outcome
        return reached.status
    return _BY_CODE.get(code, reached.status)


@dataclass(frozen=True, repr=False)
class Answered:
    """What an exchange leaves on Django's request, for code that gets another response or an exception."""

    headers: Mapping[str, str] = field(default_factory=dict)
    #: An ``IdempotencyError`` that is a crash of the handler, for example because another claim inside it was in
    #: progress elsewhere.
    crash: BaseException | None = None


_ATTRIBUTE: Final = "_idempotency_answered"


def leave_nothing(http: HttpRequest) -> None:
    """Let the middleware add no header."""
    setattr(http, _ATTRIBUTE, Answered())


def answered(http: HttpRequest) -> Answered | None:
    """What the request's last exchange left, or None if there was none."""
    return getattr(http, _ATTRIBUTE, None)


def leave_headers(
    http: HttpRequest, policy: Policy, key: str, status: str, crash: BaseException | None = None
) -> dict[str, str]:
    """Leave the headers of every response to a request with a key on the request, and return them.

    :param key: empty if the request has none, or a malformed one.
    """
    headers = {STATUS_HEADER: status}
    if key:
        # As the client sent it, which is safe to echo because it is valid.
        headers[keys.HEADER] = http.META.get(keys.META_NAME) or keys.format_header(key)
        headers[RETENTION_HEADER] = str(int(policy.retention.total_seconds()))
    setattr(http, _ATTRIBUTE, Answered(headers, crash))
    return headers
