"""requests: an adapter that sends one logical request under one key until its outcome is known.

For a client of a protected API and, inside a protected operation, for its calls to a provider. What ``contrib.httpx``
does for httpx, by the same policy.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

try:
    import requests
    from requests.adapters import HTTPAdapter
    from requests.exceptions import ChunkedEncodingError, ContentDecodingError, ProxyError
    from tenacity import Retrying
except ImportError as error:
    raise ImportError(
        "idempotency.contrib.requests needs requests and tenacity. Install them with\n"
        "    python -m pip install 'django-idempotency[requests]'"
    ) from error

from ..identity.keys import HEADER
from .retrying import RetryPolicy, Tries, bounded, new_key

__all__ = ["NAME_HEADER", "IdempotentAdapter", "RetryPolicy", "UnresolvedRequestError", "new_key"]

#: Tells the adapter what a call is called within its protected operation. The adapter takes it off: it is never sent.
NAME_HEADER = "Idempotency-Name"


class UnresolvedRequestError(requests.ConnectionError):
    """The outcome of a request is not known, and the retries are used up. It may have taken effect.

    ``key`` is the ``Idempotency-Key`` that it was sent with: save it, and send the same request with it later.
    ``attempts`` is how many requests were sent, ``response`` the last answer that came, or None. ``__cause__`` is what
    the last attempt failed with, if not with an answer.
    """

    def __init__(self, message: str, *, key: str = "", attempts: int = 0, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.key = key
        self.attempts = attempts


class RequestsTries(Tries[requests.Response]):
    errors = requests.RequestException
    retryable = (requests.ConnectionError, requests.Timeout, ChunkedEncodingError)
    permanent = (ProxyError,)

    def __init__(self, policy: RetryPolicy, request: requests.PreparedRequest, name: str | None) -> None:
        self.request = request
        url = urlsplit(request.url or "")
        place, key = f"{url.scheme}://{url.hostname}{url.path}", _text(request.headers.get(HEADER))
        super().__init__(policy, request.method or "", place, key=key, name=name)
        # On the request itself: what is made of it, after a redirect (307, 308) or a challenge, is the same operation.
        request.headers[HEADER] = self.key

    def document(self, answer: requests.Response) -> Any:
        return answer.json()

    def unresolved(self, message: str) -> UnresolvedRequestError:
        return UnresolvedRequestError(
            message, key=self.key, attempts=self.budget.attempts, request=self.request, response=self.last
        )


class IdempotentAdapter(HTTPAdapter):
    """Sends each mutating request under one ``Idempotency-Key``, and retries it until the outcome is known::

        session = requests.Session()
        session.mount("https://", IdempotentAdapter())

    A request that carries a key keeps it. Any other is given a new one, or, inside a protected operation, one that is
    derived from its claim: by ``headers={NAME_HEADER: "provider.charge"}``, which is not sent, else by method and URL,
    counted.

    Retried are timeouts, lost connections, 408, 425, 429, 502 to 504, and a 409 that says "in progress". Every other
    answer is returned as it is. A request's body is read once and held in memory, so that each attempt sends the same
    bytes. An answer's body is read within the attempt, because an answer that was cut off in the middle is no outcome;
    with ``stream=True`` it is left to be streamed, and an error in it is not retried.

    Each attempt's timeouts are the caller's, cut to what is left of ``RetryPolicy.total``.

    :param sleep: called with the seconds to wait before a retry.
    :param options: what ``requests.adapters.HTTPAdapter`` takes. Its ``max_retries`` come within an attempt.
    :raises UnresolvedRequestError: from a request: the bounds are reached and the outcome is not known. What can't be
        cured by a retry is raised as it is, if it is the first thing that happens.
    :raises LeaseLostError: from a request inside a protected operation: another attempt has taken over. The request
        was not sent, or not again.
    """

    __attrs__: ClassVar[list[str]] = [*HTTPAdapter.__attrs__, "policy", "sleep"]  # type: ignore[misc]

    def __init__(
        self, *, policy: RetryPolicy | None = None, sleep: Callable[[float], None] = time.sleep, **options: Any
    ) -> None:
        super().__init__(**options)
        self.policy = RetryPolicy() if policy is None else policy
        self.sleep = sleep

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        name = _text(request.headers.pop(NAME_HEADER, None))
        options: dict[str, Any] = {"stream": stream, "verify": verify, "cert": cert, "proxies": proxies}
        if request.method not in self.policy.methods:
            return super().send(request, timeout=timeout, **options)
        tries = RequestsTries(self.policy, request, name)
        rewind = hold_body(request)
        send = super().send

        def attempt() -> requests.Response:
            left = tries.begin()
            rewind()
            response = send(request, timeout=_cut(timeout, left), **options)
            if not stream or response.status_code == 409 or tries.is_undecided(response):
                try:
                    response.content  # noqa: B018 - read and kept, which gives its connection back
                except ContentDecodingError:
                    if response.status_code not in self.policy.statuses:
                        raise
                    response.close()  # its body is no news, and whatever it is, it settles nothing
            return response

        return Retrying(sleep=self.sleep, **tries.options)(attempt)


def hold_body(request: Any) -> Callable[[], object]:
    """Read the body of a prepared request that could only be sent once, and say how to make it ready for an attempt."""
    body = request.body
    if body is None or isinstance(body, (bytes, str)):
        return lambda: None
    if not hasattr(body, "read"):
        request.body = b"".join(_encoded(part) for part in body)
        return lambda: None
    # It stays a file, with the position that requests has noted, for redirects and challenges rewind it to that.
    start = request._body_position if isinstance(request._body_position, int) else 0
    held = io.BytesIO(b"\0" * start + _encoded(body.read()))
    request.body = held
    return lambda: held.seek(start)


def _encoded(part: bytes | str) -> bytes:
    return part.encode() if isinstance(part, str) else part


def _text(value: str | bytes | None) -> str | None:
    """A header's value as text, for requests takes bytes too."""
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _cut(timeout: Any, left: float) -> Any:
    """``timeout``, of whatever form requests takes, cut to the seconds that are left."""
    if isinstance(timeout, tuple):
        return tuple(bounded(part, left) for part in timeout)
    if timeout is None or isinstance(timeout, (int, float)):
        return bounded(timeout, left)
    return timeout  # a urllib3 Timeout, which carries a state of its own
