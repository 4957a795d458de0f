"""httpx: transports that send one logical request under one key until its outcome is known.

They wrap any other transport, for a client of a protected API and, inside a protected operation, for its calls to a
provider. Sync and async share everything but the awaiting lines.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

try:
    import httpx
    from tenacity import AsyncRetrying, Retrying
except ImportError as error:
    raise ImportError(
        "idempotency.contrib.httpx needs httpx and tenacity. Install them with\n"
        "    python -m pip install 'django-idempotency[httpx]'"
    ) from error

from ..identity.keys import HEADER
from .retrying import RetryPolicy, Tries, bounded, new_key

__all__ = ["AsyncIdempotentTransport", "IdempotentTransport", "RetryPolicy", "UnresolvedRequestError", "new_key"]

#: The extensions of a request that are meant for these transports.
NAME = "idempotency_name"
STREAM = "idempotency_stream"


class UnresolvedRequestError(httpx.TransportError):
    """The outcome of a request is not known, and the retries are used up. It may have taken effect.

    ``key`` is the ``Idempotency-Key`` that it was sent with: save it, and send the same request with it later.
    ``attempts`` is how many requests were sent, ``response`` the last answer that came, read and closed, or None.
    ``__cause__`` is what the last attempt failed with, if not with an answer.
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


class HttpxTries(Tries[httpx.Response]):
    errors = httpx.TransportError
    retryable = (httpx.TransportError,)
    permanent = (httpx.UnsupportedProtocol, httpx.ProxyError, httpx.LocalProtocolError, UnresolvedRequestError)

    def __init__(self, policy: RetryPolicy, request: httpx.Request) -> None:
        url = request.url
        place = f"{url.scheme}://{url.host}{url.raw_path.partition(b'?')[0].decode('ascii')}"
        key, name = request.headers.get(HEADER), request.extensions.get(NAME)
        super().__init__(policy, request.method, place, key=key, name=name)
        self.request = request
        self.body = b""  # of the last answer that was read
        # On the request itself: what is made of it, after a redirect (307, 308) or a challenge, is the same operation.
        request.headers[HEADER] = self.key

    def next_request(self) -> httpx.Request:
        """The request as the next attempt sends it. Raises what ``begin`` raises.

        One of its own, so that nothing that an attempt does to it is found by the next.
        """
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
        request.read()  # held in memory already
        return request

    def wants_body(self, response: httpx.Response) -> bool:
        """Whether the answer's body is still to be read as a part of the attempt.

        It belongs to it, unless the caller wants to stream it. The transport that sends may have read it already.
        """
        if response.is_stream_consumed:
            return False
        streamed = self.request.extensions.get(STREAM, False)
        return not streamed or response.status_code == 409 or self.is_undecided(response)

    def keep(self, response: httpx.Response, body: bytes) -> None:
        """Give the answer the body that was read, as it came, so that it can be read or streamed once more."""
        self.body = body
        response.stream = httpx.ByteStream(body)

    def document(self, answer: httpx.Response) -> Any:
        try:
            if not answer.is_stream_consumed:  # a copy, because reading it would leave nothing to be streamed
                answer = httpx.Response(answer.status_code, headers=answer.headers, content=self.body)
            return answer.json()
        except httpx.DecodingError as error:
            raise ValueError("Its encoding is not what it says.") from error

    def unresolved(self, message: str) -> UnresolvedRequestError:
        if self.last is not None:
            self.last.request = self.request
            with suppress(httpx.DecodingError):  # its body is no news, and whatever it is, it settles nothing
                self.last.read()
        return UnresolvedRequestError(
            message, key=self.key, attempts=self.budget.attempts, request=self.request, response=self.last
        )


class IdempotentTransport(httpx.BaseTransport):
    """Sends each mutating request under one ``Idempotency-Key``, and retries it until the outcome is known::

        client = httpx.Client(transport=IdempotentTransport())

    A request that carries a key keeps it. Any other is given a new one, or, inside a protected operation, one that is
    derived from its claim: by ``extensions={"idempotency_name": "provider.charge"}``, else by method and URL, counted.

    Retried are timeouts, lost connections, 408, 425, 429, 502 to 504, and a 409 that says "in progress". Every other
    answer is returned as it is. A request's body is read once and held in memory, so that each attempt sends the same
    bytes. So is an answer's, because an answer that was cut off in the middle is no outcome; with
    ``extensions={"idempotency_stream": True}`` its body is left to be streamed, and an error in it is not retried.

    Each attempt's timeouts are the client's, cut to what is left of ``RetryPolicy.total``.

    :param transport: the one that sends; ``httpx.HTTPTransport()`` if none is given. What httpx.Client is told of
        certificates, proxies or HTTP/2 doesn't reach a transport that it is given: tell this one.
    :param sleep: called with the seconds to wait before a retry.
    :raises UnresolvedRequestError: from a request: the bounds are reached and the outcome is not known. What can't be
        cured by a retry is raised as it is, if it is the first thing that happens.
    :raises LeaseLostError: from a request inside a protected operation: another attempt has taken over. The request
        was not sent, or not again.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.transport = httpx.HTTPTransport() if transport is None else transport
        self.policy = RetryPolicy() if policy is None else policy
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
                    stream.close()  # its connection is free for the next attempt
            return response

        return Retrying(sleep=self.sleep, **tries.options)(attempt)

    def close(self) -> None:
        self.transport.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """``IdempotentTransport`` for ``httpx.AsyncClient``.

    A coroutine and the tasks it starts run under the claim that is current where they are started. Tasks that run at
    once ask for their keys in no order that another attempt would repeat, so give such calls a name each.

    :param transport: the one that sends; ``httpx.AsyncHTTPTransport()`` if none is given.
    :param sleep: called with the seconds to wait, and awaited; by default that of asyncio or trio, whichever runs.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self.transport = httpx.AsyncHTTPTransport() if transport is None else transport
        self.policy = RetryPolicy() if policy is None else policy
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
