"""The logic of the HTTP clients: the key of a request, and the decisions whether, when and for how long to retry it.

``contrib.httpx`` and ``contrib.requests`` add the lines in which their libraries differ. No Django project is needed.
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

#: Statuses that leave the outcome open. 500 is not among them, because a retry would usually get it again.
RETRYABLE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})

#: An attempt that begins shortly before the end of the time still gets this many seconds. With less it would only fail.
LEAST_TIMEOUT = 1.0

#: The header with what the server knows of the key, and its values: the operation has run and this is its outcome;
#: another attempt of this client can learn no more.
STATUS_HEADER = "Idempotency-Status"
OUTCOMES = frozenset({"executed", "replayed"})
SETTLED = OUTCOMES | {"recorded", "reused", "ignored"}

#: The codes for "in progress" of this package's profiles, the second of which is Stripe's, too.
IN_PROGRESS_CODES = frozenset({"idempotency_in_progress", "idempotency_key_in_use", "idempotency_in_flight"})

#: The name under which a request remembers the key that was made for it.
_MADE = "idempotency_made_key"

_SECONDS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class RetryPolicy:
    """What is retried, and within which bounds. Durations are in seconds.

    :param methods: the methods of the requests that get a key and are retried; all others pass through unchanged.
    :param attempts: how many requests are sent at most, including the first.
    :param total: how long all attempts and waits may take together. Inside a protected operation it is also bounded by
        the operation's ``heartbeat`` or else ``lease``, because after that the claim may be lost.
    :param first_wait: the wait before the second attempt is a random time from 0 to this.
    :param longest_wait: the range of the random wait doubles with each attempt, up to this. A ``Retry-After`` is added.
    :param statuses: the statuses that are retried, besides an answer that says that the first request is in progress.
        An answer that says that its outcome is recorded, or that the key protects nothing, is not retried.
    :raises ValueError: a bound is not positive.
    """

    methods: Collection[str] = frozenset({"POST", "PATCH"})
    attempts: int = 10
    total: float = 120.0  # longer than a server's default lease, so that a client outlasts a worker that was killed
    first_wait: float = 0.5
    longest_wait: float = 30.0
    statuses: Collection[int] = RETRYABLE_STATUSES

    def __post_init__(self) -> None:
        for name in ("attempts", "total", "first_wait", "longest_wait"):
            if getattr(self, name) <= 0:
                raise ValueError(f"RetryPolicy.{name} must be above 0, not {getattr(self, name)!r}.")


def read_key_status(document: Any, headers: Mapping[str, str]) -> KeyStatus:
    """Read the parsed answer of a ``KeyStatusView``.

    :raises ValueError: it is the answer of something else, such as a login page.
    """
    if not isinstance(document, dict) or not isinstance(document.get("status"), str):
        raise ValueError("The server did not answer with the status of a key. Is this the URL of a KeyStatusView?")
    times = {
        name: datetime.fromisoformat(str(document[name]))
        for name in ("created_at", "completed_at", "expires_at")
        if document.get(name) is not None
    }
    return KeyStatus(document["status"], document.get("response_status"), retry_after=retry_after(headers), **times)


@dataclass
class MadeKey:
    """A key that was made for a request. A request that is made from it, after a redirect or a challenge, shares it."""

    key: str
    #: Whether the outcome is known. The request is then a new one when it is sent again.
    is_used: bool = False


class Tries(ABC):
    """One logical request: its key, and after each attempt the decision whether its outcome is known.

    :param request: the library's request.
    :param place: the scheme, host and path of its URL.
    :param key: the key that the caller has set, or None.
    :param name: the name of the call inside its protected operation, or None.
    :raises LeaseLostError: the request is made inside a protected operation whose lease is lost.
    """

    #: The error that ends the retries.
    unresolved: ClassVar[type[Any]]
    #: The base class of the errors that the library raises when there is no response.
    errors: ClassVar[type[Exception]]
    #: The errors after which another attempt may learn the outcome.
    retryable: ClassVar[tuple[type[Exception], ...]]
    #: Subclasses of these errors that every attempt would meet again.
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
        else:  # derived from the operation's identity and the name, so each attempt of the operation sends the same key
            self.key = str(self.claim.derive_key(self.claim.name_call(self.call) if name is None else name))
        if self.key != key:
            self._made = self.marks[_MADE] = MadeKey(self.key)
        # Set the key on the request itself, so that a request that is made from it after a redirect (307, 308) or a
        # challenge has the same key.
        request.headers[HEADER] = self.key
        self.total: float = policy.total
        if self.claim is not None:
            operation = self.claim.operation
            self.total = min(self.total, (operation.policy.heartbeat or operation.policy.lease).total_seconds())
        self.attempts: int = 0
        #: How the latest attempt failed, if it did, and the latest response that left the outcome open.
        self.error: BaseException | None = None
        self.last: Any = None
        self._started = time.monotonic()
        self._waited = 0.0

    @property
    @abstractmethod
    def marks(self) -> MutableMapping[str, Any]:
        """What the library's request can carry beside its message."""

    @abstractmethod
    def document(self, answer: Any) -> Any:
        """The parsed body of a response.

        :raises ValueError: it is not JSON.
        """

    def begin(self) -> float:
        """Begin an attempt.

        :returns: how many seconds it has.
        :raises LeaseLostError: the lease was lost meanwhile, so the request must not be sent.
        """
        if self.claim is not None:
            self.claim.ensure_owned()
        self.attempts += 1
        return max(LEAST_TIMEOUT, self.total - self._spent())

    def _spent(self) -> float:
        # A pause counts in full even if ``sleep`` returns early, as in tests, so that the retries end.
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
        # The 409 of another server is taken for "in progress" if it has a Retry-After.
        return "Retry-After" in answer.headers

    def _code_of(self, answer: Any) -> str:
        """The code of a problem, which profile stripe encloses in ``error``."""
        try:
            document = self.document(answer)
        except (ValueError, RecursionError):
            return ""
        for found in (document, document.get("error") if isinstance(document, dict) else None):
            if isinstance(found, dict) and "code" in found:
                return str(found["code"])
        return ""

    def _is_outcome(self, answer: Any) -> bool:
        """Whether the answer is what has become of the operation. A server that does not say so has said it by 2xx."""
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
            self._raise_unresolved(state)  # no retry can help, but an earlier attempt may have taken effect
        return False

    def _wait(self, state: RetryCallState) -> float:
        """The server's ``Retry-After`` plus a random time, so that clients don't all come back at once."""
        drawn = wait_random_exponential(multiplier=self.policy.first_wait, max=self.policy.longest_wait)(state)
        asked = retry_after(self.last.headers) if self.error is None else None
        return drawn + (asked or 0.0)

    def _must_stop(self, state: RetryCallState) -> bool:
        # If the Retry-After is longer than the time that is left, stop: an earlier retry would get the same response.
        return self.attempts >= self.policy.attempts or self._spent() + state.upcoming_sleep >= self.total

    def _postpone(self, state: RetryCallState) -> None:
        self._waited += state.upcoming_sleep
        logger.info(
            "%s with key %s: attempt %d was left without an outcome (%s); the next one is in %.1f s",
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
            f"{self.call}: the outcome is not known after {self.attempts} attempt(s) ({self._reason}). It may "
            f"have taken effect. Resume later with the same {HEADER} and the same payload, never with a new key: "
            f"{shorten(self.key)}, in full in this error's `key`."
        )
        error: Exception = self.unresolved(
            message, key=self.key, attempts=self.attempts, request=self.request, response=self.last
        )
        raise error from self.error


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the ``Retry-After`` of a response, in either form (RFC 9110, section 10.2.3).

    :returns: seconds from the response on; 0 for a date in the past; None if there is none or it can't be read.
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
    """Whether the server's certificate was refused. The next attempt would refuse it, too."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
