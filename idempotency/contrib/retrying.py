"""Shared by ``contrib.httpx`` and ``contrib.requests``: the key of a request, and whether and when to retry it.

No Django project is needed.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Final, NoReturn

from . import needing

with needing("httpx"):
    from tenacity import RetryCallState
    from tenacity.wait import wait_random_exponential

from ..identity.keys import HEADER, KeyStatus, new_key, shorten
from ..protocol.context import current_claim

logger: Final = logging.getLogger("idempotency")

__all__ = ["RetryPolicy"]

#: Statuses that leave the outcome unknown. A 500 is missing, because a retry would usually get it again.
RETRYABLE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})

#: The minimum timeout of an attempt in seconds, even close to the end of the total. A shorter attempt would only fail.
LEAST_TIMEOUT = 1.0

#: The response header with the status of the key.
STATUS_HEADER = "Idempotency-Status"
#: Its values for responses that are the operation's outcome.
OUTCOMES = frozenset({"executed", "replayed"})
#: Its values for responses that a retry would not change.
SETTLED = OUTCOMES | {"recorded", "reused", "ignored"}

#: The profiles' codes for "in progress".
IN_PROGRESS_CODES = frozenset({"idempotency_in_progress", "idempotency_key_in_use", "idempotency_in_flight"})

#: The mark of a request that holds its ``MadeKey``.
_MADE = "idempotency_made_key"

_SECONDS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class RetryPolicy:
    """Which requests are retried, and within which bounds. Durations are in seconds.

    :param methods: the methods that get a key and are retried. Other requests pass through unchanged.
    :param attempts: the maximum number of requests, including the first.
    :param total: the maximum time for all attempts and waits. Inside a protected operation it is also bounded by the
        operation's ``heartbeat`` or else ``lease``, because after that the claim may be lost.
    :param first_wait: the maximum of the random wait before the second attempt.
    :param longest_wait: the maximum doubles with each attempt, up to this limit. A ``Retry-After`` is added.
    :param statuses: the statuses that are retried. A request in progress is always retried. A recorded outcome, or a
        key that protects nothing, is never retried.
    :raises ValueError: a bound is not positive.
    """

    methods: Collection[str] = frozenset({"POST", "PATCH"})
    attempts: int = 10
    total: float = 120.0  # longer than a server's default lease, so that a client outlasts a killed worker
    first_wait: float = 0.5
    longest_wait: float = 30.0
    statuses: Collection[int] = RETRYABLE_STATUSES

    def __post_init__(self) -> None:
        for name in ("attempts", "total", "first_wait", "longest_wait"):
            if getattr(self, name) <= 0:
                raise ValueError(f"RetryPolicy.{name} must be above 0, not {getattr(self, name)!r}.")


def read_key_status(document: Any, headers: Mapping[str, str]) -> KeyStatus:
    """Read the parsed response of a ``KeyStatusView``.

    :raises ValueError: it is something else, such as a login page.
    """
    if not isinstance(document, dict) or not isinstance(document.get("status"), str):
        raise ValueError("The response is not the status of a key. Is this the URL of a KeyStatusView?")
    times = {
        name: datetime.fromisoformat(str(document[name]))
        for name in ("created_at", "completed_at", "expires_at")
        if document.get(name) is not None
    }
    return KeyStatus(document["status"], document.get("response_status"), retry_after=retry_after(headers), **times)


@dataclass
class MadeKey:
    """The key generated for a request. Its copies for redirects and challenges share it."""

    key: str
    #: Whether the outcome is known. The same request sent later is then a new logical request.
    is_used: bool = False


class Tries(ABC):
    """One logical request and its attempts.

    :param request: the library's request.
    :param place: the scheme, host and path of its URL.
    :param key: the caller's key, or None.
    :param name: the name of the call inside its protected operation, or None.
    :raises LeaseLostError: the protected operation around the request has lost its lease.
    """

    #: The error that ends the retries.
    unresolved: ClassVar[type[Any]]
    #: The base class of the errors that the library raises when there is no response.
    errors: ClassVar[type[Exception]]
    #: The errors after which another attempt may learn the outcome.
    retryable: ClassVar[tuple[type[Exception], ...]]
    #: Subclasses of these errors that every attempt would raise again.
    permanent: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, policy: RetryPolicy, request: Any, place: str, key: str | None, name: str | None) -> None:
        self.policy = policy
        self.request = request
        self.call: str = f"{request.method} {place}"
        self.claim: Final = current_claim()
        made: MadeKey | None = self.marks.get(_MADE)
        self._made: MadeKey | None = made if made is not None and made.key == key else None
        if key is not None and (self._made is None or not self._made.is_used):
            self.key: str = key
        elif self.claim is None:
            self.key = new_key()
        else:  # each attempt of the operation derives the same key
            self.key = str(self.claim.derive_key(self.claim.name_call(self.call) if name is None else name))
        if self.key != key:
            self._made = self.marks[_MADE] = MadeKey(self.key)
        # On the request itself, so that redirects (307, 308) and challenges send the same key.
        request.headers[HEADER] = self.key
        self.total: float = policy.total
        if self.claim is not None:
            operation = self.claim.operation
            self.total = min(self.total, (operation.policy.heartbeat or operation.policy.lease).total_seconds())
        self.attempts: int = 0
        #: The error of the latest attempt, and the latest response that left the outcome unknown.
        self.error: BaseException | None = None
        self.last: Any = None
        self._started = time.monotonic()
        self._waited = 0.0

    @property
    @abstractmethod
    def marks(self) -> MutableMapping[str, Any]:
        """A dictionary that a request shares with its copies for redirects and challenges."""

    @abstractmethod
    def document(self, answer: Any) -> Any:
        """The parsed body of a response.

        :raises ValueError: it is not JSON.
        """

    def begin(self) -> float:
        """Begin an attempt, and return its timeout in seconds.

        :raises LeaseLostError: the lease was lost in the meantime, so the request must not be sent.
        """
        if self.claim is not None:
            self.claim.ensure_owned()
        self.attempts += 1
        return max(LEAST_TIMEOUT, self.total - self._spent())

    def _spent(self) -> float:
        # Count pauses in full even if ``sleep`` returns early, as in tests, so that the retries end.
        return max(time.monotonic() - self._started, self._waited)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of tenacity's ``Retrying`` and ``AsyncRetrying``."""
        return {
            "retry": self._is_open,
            "wait": self._wait,
            "stop": self._must_stop,
            "before_sleep": self._postpone,
            "retry_error_callback": self._raise_unresolved,
        }

    def is_undecided(self, answer: Any) -> bool:
        """Whether another attempt may get another answer."""
        known = answer.headers.get(STATUS_HEADER)
        if known == "in-progress":
            return True
        if known in SETTLED:
            return False
        if answer.status_code != 409:
            return answer.status_code in self.policy.statuses
        code = self._code_of(answer)
        if code.startswith("idempotency_"):
            return code in IN_PROGRESS_CODES
        # Treat another server's 409 as "in progress" if it has a Retry-After.
        return "Retry-After" in answer.headers

    def _code_of(self, answer: Any) -> str:
        """The code of a problem. The stripe profile nests it in ``error``."""
        try:
            document = self.document(answer)
        except (ValueError, RecursionError):
            return ""
        for found in (document, document.get("error") if isinstance(document, dict) else None):
            if isinstance(found, dict) and "code" in found:
                return str(found["code"])
        return ""

    def _is_outcome(self, answer: Any) -> bool:
        """Whether the response is the operation's outcome. Without the status header, a 2xx is."""
        known = answer.headers.get(STATUS_HEADER)
        return known in OUTCOMES if known is not None else 200 <= answer.status_code < 300

    def _is_open(self, state: RetryCallState) -> bool:
        assert state.outcome is not None
        self.error = error = state.outcome.exception()
        if error is None:
            answer = state.outcome.result()
            if is_open := self.is_undecided(answer):
                self.last = answer
            elif self._made is not None:
                self._made.is_used = self._is_outcome(answer)
            return is_open
        if isinstance(error, self.retryable) and not isinstance(error, self.permanent) and not _is_untrusted(error):
            return True
        if isinstance(error, self.errors) and self.attempts > 1:
            self._raise_unresolved(state)  # a retry can't succeed, but an earlier attempt may have taken effect
        return False

    def _wait(self, state: RetryCallState) -> float:
        """``Retry-After`` plus a random time, so that clients don't all retry at once."""
        drawn = wait_random_exponential(multiplier=self.policy.first_wait, max=self.policy.longest_wait)(state)
        required = retry_after(self.last.headers) if self.error is None else None
        return drawn + (required or 0.0)

    def _must_stop(self, state: RetryCallState) -> bool:
        # Stop if the Retry-After exceeds the remaining time: an earlier retry would get the same response.
        return self.attempts >= self.policy.attempts or self._spent() + state.upcoming_sleep >= self.total

    def _postpone(self, state: RetryCallState) -> None:
        self._waited += state.upcoming_sleep
        logger.info(
            "%s with key %s: attempt %d has no outcome (%s); next attempt in %.1f s",
            self.call,
            shorten(self.key),
            self.attempts,
            self._reason,
            state.upcoming_sleep,
        )

    @property
    def _reason(self) -> str:
        error = self.error
        return f"status {self.last.status_code}" if error is None else f"{type(error).__name__}: {error}"

    def _raise_unresolved(self, state: RetryCallState) -> NoReturn:
        message = (
            f"{self.call}: the outcome is unknown after {self.attempts} attempt(s) ({self._reason}). The request may "
            f"have taken effect. Resend it later with the same {HEADER} and payload, never with a new key. The key is "
            f"this error's `key`: {shorten(self.key)}."
        )
        error: Exception = self.unresolved(
            message, key=self.key, attempts=self.attempts, request=self.request, response=self.last
        )
        raise error from self.error


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the ``Retry-After`` of a response, in either form (RFC 9110, section 10.2.3).

    :returns: seconds after the response; 0 for a date in the past; None if it is missing or malformed.
    """
    value = headers.get("Retry-After", "").strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    moment = _moment(value)
    if moment is None:
        return None
    # Use the server's clock if its response has a Date, because the client's clock may be minutes off.
    now = _moment(headers.get("Date", "")) or datetime.now(UTC)
    return max(0.0, (moment - now).total_seconds())


def _moment(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def bounded(timeout: float | None, left: float) -> float:
    return left if timeout is None else min(timeout, left)


def _is_untrusted(error: BaseException | None) -> bool:
    """Whether the server's certificate was rejected. A retry would reject it again."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
