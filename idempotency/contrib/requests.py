"""requests: an adapter that sends one logical request under one key until its outcome is known."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from . import needing

with needing("requests"):
    import requests
    from requests.adapters import HTTPAdapter
    from requests.exceptions import ChunkedEncodingError, ContentDecodingError, ProxyError
    from tenacity import Retrying

from ..identity.keys import HEADER, KeyStatus, new_key
from .retrying import RetryPolicy, Tries, bounded, read_key_status

__all__ = [
    "NAME_HEADER",
    "IdempotentAdapter",
    "KeyStatus",
    "RetryPolicy",
    "UnresolvedRequestError",
    "fetch_key_status",
    "new_key",
]

#: The header with the name of a call inside its protected operation. The adapter removes it, so it is never sent.
NAME_HEADER = "Idempotency-Name"


class UnresolvedRequestError(requests.ConnectionError):
    """The retries are used up, and the outcome is unknown. The request may have taken effect.

    ``key`` (str) is the ``Idempotency-Key``: save it, and send the same request with it later. ``attempts`` (int) is
    the number of requests sent. ``response`` is the last response, or None.
    """

    def __init__(self, message: str, *, key: str = "", attempts: int = 0, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.key = key
        self.attempts = attempts


class RequestsTries(Tries):
    unresolved = UnresolvedRequestError
    errors: ClassVar[type[Exception]] = requests.RequestException
    retryable: ClassVar[tuple[type[Exception], ...]] = (
        requests.ConnectionError,
        requests.Timeout,
        ChunkedEncodingError,
    )
    permanent: ClassVar[tuple[type[Exception], ...]] = (ProxyError,)

    def __init__(self, policy: RetryPolicy, request: requests.PreparedRequest, name: str | None) -> None:
        url = urlsplit(request.url or "")
        place = f"{url.scheme}://{url.hostname}{url.path}"
        super().__init__(policy, request, place, _text(request.headers.get(HEADER)), name)

    @property
    def marks(self) -> MutableMapping[str, Any]:
        # The only dictionary that a request shares with its copies for redirects and challenges.
        return self.request.hooks  # type: ignore[no-any-return]

    def document(self, answer: requests.Response) -> Any:
        return answer.json()


class IdempotentAdapter(HTTPAdapter):
    """Sends each mutating request under one ``Idempotency-Key``, and retries it until the outcome is known::

        session = requests.Session()
        session.mount("https://", IdempotentAdapter())

    Keys, retries and errors work as in ``IdempotentTransport``. To name a call for its derived key, set
    ``headers={NAME_HEADER: "provider.charge"}``, which is not sent. With ``stream=True``, the caller can stream the
    response, and an error in its body is not retried.

    :param policy: what is retried, and how often; by default ``RetryPolicy()``.
    :param sleep: called with the seconds to wait before a retry.
    :param options: the arguments of ``requests.adapters.HTTPAdapter``. Its ``max_retries`` apply within each attempt.
    """

    __attrs__: ClassVar[list[str]] = [*HTTPAdapter.__attrs__, "policy", "sleep"]  # type: ignore[misc]

    def __init__(
        self, *, policy: RetryPolicy | None = None, sleep: Callable[[float], None] = time.sleep, **options: Any
    ) -> None:
        super().__init__(**options)
        self.policy: Final = RetryPolicy() if policy is None else policy
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
                    response.content  # noqa: B018 - reads the body, which frees the connection
                except ContentDecodingError:
                    if response.status_code not in self.policy.statuses:
                        raise
                    response.close()  # the status alone shows that the outcome is unknown
            return response

        return Retrying(sleep=self.sleep, **tries.options)(attempt)


def fetch_key_status(
    session: requests.Session, url: str, key: str, *, timeout: float | tuple[float, float] = 10.0
) -> KeyStatus:
    """Query the state of a key on its server. Nothing runs there.

    :param session: any session, with the credentials of the account that used the key.
    :param url: the URL of a ``KeyStatusView``.
    :param key: the key, as sent.
    :param timeout: in seconds, in any form that ``requests`` accepts.
    :raises requests.RequestException: the request fails without a response, the status is 4xx or 5xx, or the body
        can't be parsed as JSON.
    :raises ValueError: the response does not come from a ``KeyStatusView``.
    """
    response = session.get(url, headers={HEADER: key}, timeout=timeout)
    response.raise_for_status()
    return read_key_status(response.json(), response.headers)


def hold_body(request: Any) -> Callable[[], object]:
    """Keep the body of a prepared request in memory. Returns a function to call before each attempt."""
    body = request.body
    if body is None or isinstance(body, (bytes, str)):
        return lambda: None
    if not hasattr(body, "read"):
        request.body = b"".join(_encoded(part) for part in body)
        return lambda: None
    # Keep a file with the position that requests recorded, because redirects and challenges rewind to it.
    start = request._body_position if isinstance(request._body_position, int) else 0
    stream = io.BytesIO(b"\0" * start + _encoded(body.read()))
    request.body = stream
    return lambda: stream.seek(start)


def _encoded(part: bytes | str) -> bytes:
    return part.encode() if isinstance(part, str) else part


def _text(value: str | bytes | None) -> str | None:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _cut(timeout: Any, left: float) -> Any:
    """``timeout`` in any form that requests accepts, limited to the remaining seconds."""
    if isinstance(timeout, tuple):
        return tuple(bounded(part, left) for part in timeout)
    if timeout is None or isinstance(timeout, (int, float)):
        return bounded(timeout, left)
    return timeout  # a urllib3 Timeout is stateful
