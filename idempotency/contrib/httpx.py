"""httpx: transports that send one logical request under one key until its outcome is known.

They wrap any other transport. Sync and async share everything except the lines with ``await``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from . import needing

with needing("httpx"):
    import httpx
    from tenacity import AsyncRetrying, Retrying

from ..identity.keys import HEADER, KeyStatus, new_key
from .retrying import RetryPolicy, Tries, bounded, read_key_status

__all__ = [
    "AsyncIdempotentTransport",
    "IdempotentTransport",
    "KeyStatus",
    "RetryPolicy",
    "UnresolvedRequestError",
    "afetch_key_status",
    "fetch_key_status",
    "new_key",
]

#: The extensions of a request that these transports read.
NAME = "idempotency_name"
STREAM = "idempotency_stream"


class UnresolvedRequestError(httpx.TransportError):
    """The retries are used up, and the outcome is unknown. The request may have taken effect.

    ``key`` (str) is the ``Idempotency-Key``: save it, and send the same request with it later. ``attempts`` (int) is
    the number of requests sent. ``response`` is the last response, read and closed, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str = "",
        attempts: int = 0,
        request: httpx.Request | None = None,
        response: httpx.Response | None = None,
    ) -> None:
        super().__init__(message, request=request)
        self.key = key
        self.attempts = attempts
        self.response = response
        if request is not None and response is not None:
            response.request = request
            with suppress(httpx.DecodingError):  # the outcome is unknown, even if the body can't be read
                response.read()


class HttpxTries(Tries):
    unresolved = UnresolvedRequestError
    errors: ClassVar[type[Exception]] = httpx.TransportError
    retryable: ClassVar[tuple[type[Exception], ...]] = (httpx.TransportError,)
    permanent: ClassVar[tuple[type[Exception], ...]] = (
        httpx.UnsupportedProtocol,
        httpx.ProxyError,
        httpx.LocalProtocolError,
        UnresolvedRequestError,
    )

    def __init__(self, policy: RetryPolicy, request: httpx.Request) -> None:
        url = request.url
        place = f"{url.scheme}://{url.host}{url.raw_path.partition(b'?')[0].decode('ascii')}"
        super().__init__(policy, request, place, request.headers.get(HEADER), request.extensions.get(NAME))
        self.body: bytes = b""  # the last response body that was read

    @property
    def marks(self) -> MutableMapping[str, Any]:
        return self.request.extensions  # type: ignore[no-any-return]

    def next_request(self) -> httpx.Request:
        """Copy the request for the next attempt, because a transport may change it. Raises the errors of ``begin``."""
        left = self.begin()
        timeouts = self.request.extensions.get("timeout", {})
        cut = {name: bounded(timeouts.get(name), left) for name in ("connect", "read", "write", "pool")}
        request = httpx.Request(
            self.request.method,
            self.request.url,
            headers=self.request.headers,
            stream=self.request.stream,
            extensions={**self.request.extensions, "timeout": cut},
        )
        request.read()  # reads from memory
        return request

    def wants_body(self, response: httpx.Response) -> bool:
        """Whether the attempt must read the body, instead of the caller or the wrapped transport."""
        if response.is_stream_consumed:
            return False
        streamed = self.request.extensions.get(STREAM, False)
        return not streamed or response.status_code == 409 or self.is_undecided(response)

    def keep(self, response: httpx.Response, body: bytes) -> None:
        """Put the bytes back into the response, so that the caller can read or stream them."""
        self.body = body
        response.stream = httpx.ByteStream(body)

    def document(self, answer: httpx.Response) -> Any:
        try:
            if not answer.is_stream_consumed:  # read a copy, so that the caller can stream it
                answer = httpx.Response(answer.status_code, headers=answer.headers, content=self.body)
            return answer.json()
        except httpx.DecodingError as error:
            raise ValueError("The body does not match the Content-Encoding of the response.") from error


class IdempotentTransport(httpx.BaseTransport):
    """Sends each mutating request under one ``Idempotency-Key``, and retries it until the outcome is known::

        client = httpx.Client(transport=IdempotentTransport())

    A request that has a key keeps it. Otherwise it gets a new key or, inside a protected operation, a key derived from
    the claim: by the name in ``extensions={"idempotency_name": "provider.charge"}``, or else by method, URL and the
    number of the call.

    The request and response bodies are kept in memory. With ``extensions={"idempotency_stream": True}``, the caller can
    stream the response, and an error in its body is not retried.

    :param transport: the transport that sends, by default ``httpx.HTTPTransport()``. Set its certificates, proxies and
        HTTP/2 here, because ``httpx.Client`` does not pass these options on to a given transport.
    :param policy: what is retried, and how often; by default ``RetryPolicy()``.
    :param sleep: called with the seconds to wait before a retry.
    :raises UnresolvedRequestError: from a request, when the bounds are reached and the outcome is unknown. If the first
        attempt fails with an error that a retry can't fix, that error is raised instead.
    :raises LeaseLostError: from a request inside a protected operation, if another attempt has taken over. The request
        was not sent, or not sent again.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.transport: Final = httpx.HTTPTransport() if transport is None else transport
        self.policy: Final = RetryPolicy() if policy is None else policy
        self.sleep = sleep

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in self.policy.methods:
            return self.transport.handle_request(request)
        tries = HttpxTries(self.policy, request)
        request.read()

        def attempt() -> httpx.Response:
            response = self.transport.handle_request(tries.next_request())
            if tries.wants_body(response):
                stream = response.stream
                assert isinstance(stream, httpx.SyncByteStream)
                try:
                    tries.keep(response, b"".join(stream))
                finally:
                    stream.close()  # frees the connection for the next attempt
            return response

        return Retrying(sleep=self.sleep, **tries.options)(attempt)

    def close(self) -> None:
        self.transport.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """``IdempotentTransport`` for ``httpx.AsyncClient``.

    Tasks run under the claim that is current where they are started. Name the calls of concurrent tasks, because
    another attempt may make them in a different order.

    :param transport: the transport that sends, by default ``httpx.AsyncHTTPTransport()``.
    :param policy: as for ``IdempotentTransport``.
    :param sleep: awaited with the seconds to wait; by default the ``sleep`` of asyncio or trio.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self.transport: Final = httpx.AsyncHTTPTransport() if transport is None else transport
        self.policy: Final = RetryPolicy() if policy is None else policy
        self.sleep: Any = AsyncRetrying().sleep if sleep is None else sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method not in self.policy.methods:
            return await self.transport.handle_async_request(request)
        tries = HttpxTries(self.policy, request)
        await request.aread()

        async def attempt() -> httpx.Response:
            response = await self.transport.handle_async_request(tries.next_request())
            if tries.wants_body(response):
                stream = response.stream
                assert isinstance(stream, httpx.AsyncByteStream)
                try:
                    tries.keep(response, b"".join([part async for part in stream]))
                finally:
                    await stream.aclose()
            return response

        return await AsyncRetrying(sleep=self.sleep, **tries.options)(attempt)

    async def aclose(self) -> None:
        await self.transport.aclose()


def fetch_key_status(client: httpx.Client, url: str, key: str) -> KeyStatus:
    """Query the state of a key on its server. Nothing runs there.

    :param client: any client, with the credentials of the account that used the key.
    :param url: the URL of a ``KeyStatusView``, absolute or below the client's ``base_url``.
    :param key: the key, as sent.
    :raises httpx.HTTPError: the request fails without a response, or the status is outside 2xx.
    :raises ValueError: the response does not come from a ``KeyStatusView``.
    """
    response = client.get(url, headers={HEADER: key}).raise_for_status()
    return read_key_status(response.json(), response.headers)


async def afetch_key_status(client: httpx.AsyncClient, url: str, key: str) -> KeyStatus:
    """``fetch_key_status`` for ``httpx.AsyncClient``."""
    response = (await client.get(url, headers={HEADER: key})).raise_for_status()
    return read_key_status(response.json(), response.headers)
