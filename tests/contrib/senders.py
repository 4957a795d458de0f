"""The three clients behind one interface, so that one contract holds for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import requests

from idempotency.contrib import httpx as with_httpx
from idempotency.contrib import requests as with_requests
from idempotency.contrib.retrying import RetryPolicy

#: Nothing here speaks TLS, and to read the certificates for each request takes longer than to send it.
NO_TLS = False

#: Seconds. Longer than any answer takes on a busy machine.
PATIENCE = 30.0


@dataclass
class Answer:
    status: int
    body: bytes
    headers: Any
    key: str | None  # that the request was sent with


@dataclass
class Sender:
    """Sends as one library does. ``waits`` are the seconds that it would have slept."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    timeout: float = PATIENCE
    waits: list[float] = field(default_factory=list)
    #: Called with each wait, for what is to happen meanwhile.
    meanwhile: Callable[[], object] = lambda: None
    unresolved: type[Exception] = field(init=False)
    transport_errors: type[Exception] = field(init=False)
    undecodable: type[Exception] = field(init=False)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.meanwhile()

    def send(
        self,
        url: str,
        content: Any = b"{}",
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        name: str | None = None,
    ) -> Answer:
        return self._send(method, url, content, headers or {}, name)

    def _send(self, method: str, url: str, content: Any, headers: dict[str, str], name: str | None) -> Answer:
        raise NotImplementedError


class Httpx(Sender):
    unresolved = with_httpx.UnresolvedRequestError
    transport_errors = httpx.TransportError
    undecodable = httpx.DecodingError

    def _send(self, method: str, url: str, content: Any, headers: dict[str, str], name: str | None) -> Answer:
        transport = with_httpx.IdempotentTransport(
            httpx.HTTPTransport(verify=NO_TLS), policy=self.policy, sleep=self.sleep
        )
        with httpx.Client(transport=transport, timeout=self.timeout) as client:
            response = client.request(method, url, content=content, headers=headers, extensions=_extensions(name))
        return _answer(response)


class AsyncHttpx(Httpx):
    def _send(self, method: str, url: str, content: Any, headers: dict[str, str], name: str | None) -> Answer:
        async def sleep(seconds: float) -> None:
            self.sleep(seconds)

        async def send() -> Answer:
            inner = httpx.AsyncHTTPTransport(verify=NO_TLS)
            transport = with_httpx.AsyncIdempotentTransport(inner, policy=self.policy, sleep=sleep)
            async with httpx.AsyncClient(transport=transport, timeout=self.timeout) as client:
                return _answer(
                    await client.request(method, url, content=content, headers=headers, extensions=_extensions(name))
                )

        return asyncio.run(send())


class Requests(Sender):
    unresolved = with_requests.UnresolvedRequestError
    transport_errors = requests.RequestException
    undecodable = requests.exceptions.ContentDecodingError

    def _send(self, method: str, url: str, content: Any, headers: dict[str, str], name: str | None) -> Answer:
        sent = {**headers, **({} if name is None else {with_requests.NAME_HEADER: name})}
        with requests.Session() as session:
            session.trust_env = False
            session.mount("http://", with_requests.IdempotentAdapter(policy=self.policy, sleep=self.sleep))
            response = session.request(method, url, data=content, headers=sent, timeout=self.timeout)
            key = response.request.headers.get("Idempotency-Key")
            assert not isinstance(key, bytes)
            return Answer(response.status_code, response.content, response.headers, key)


def _extensions(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"idempotency_name": name}


def _answer(response: httpx.Response) -> Answer:
    key = response.request.headers.get("Idempotency-Key")
    return Answer(response.status_code, response.content, response.headers, key)


SENDERS: dict[str, type[Sender]] = {"httpx": Httpx, "async": AsyncHttpx, "requests": Requests}
