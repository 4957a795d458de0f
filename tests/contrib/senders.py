"""The three clients behind one interface, so that one contract holds for all of them."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import pytest
import requests
from requests.adapters import HTTPAdapter

from idempotency.contrib import httpx as with_httpx
from idempotency.contrib import requests as with_requests
from idempotency.contrib.retrying import RetryPolicy

#: Nothing here speaks TLS, and to read the certificates for each request takes longer than to send it.
NO_TLS = False

#: Seconds. Longer than any answer takes on a busy machine.
PATIENCE = 30.0

KEY = "Idempotency-Key"


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Any
    key: Any  # that the request was sent with


@dataclass
class Sender:
    """Sends as one library does. ``waits`` are the seconds that it would have slept."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    timeout: float = PATIENCE
    waits: list[float] = field(default_factory=list)
    #: The seconds that each attempt was allowed to wait for its answer.
    allowed: list[float] = field(default_factory=list)
    #: What the network does to the next attempts, which then reach no server.
    errors: list[Exception] = field(default_factory=list)
    #: Called with each wait, for what is to happen meanwhile.
    meanwhile: Callable[[], object] = lambda: None

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.meanwhile()

    def attempt(self, timeout):
        self.allowed.append(timeout)
        if self.errors:
            raise self.errors.pop(0)

    def send(self, url, content=b"{}", *, method="POST", name="", headers=None):
        response = self.request(method, url, content, name, dict(headers or {}))
        return Answer(response.status_code, response.content, response.headers, response.request.headers.get(KEY))

    def give_up(self, url, **options):
        """Send in vain, and return what is raised at last."""
        with pytest.raises(self.unresolved) as raised:
            self.send(url, **options)
        return raised.value


class RecordingTransport(httpx.HTTPTransport):
    def handle_request(self, request):
        self.sender.attempt(request.extensions["timeout"]["read"])
        return super().handle_request(request)


class AsyncRecordingTransport(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request):
        self.sender.attempt(request.extensions["timeout"]["read"])
        return await super().handle_async_request(request)


class RecordingAdapter(HTTPAdapter):
    """Stands between the idempotent adapter and the one of the library."""

    def send(self, request, *args, **options):
        self.sender.attempt(options["timeout"])
        return super().send(request, *args, **options)


class IdempotentRecordingAdapter(with_requests.IdempotentAdapter, RecordingAdapter): ...


class Httpx(Sender):
    status_error = httpx.HTTPStatusError
    unresolved = with_httpx.UnresolvedRequestError
    transport_errors = httpx.TransportError
    undecodable = httpx.DecodingError
    cut = httpx.ReadError("cut")
    hopeless = (
        httpx.UnsupportedProtocol("no scheme"),
        httpx.ProxyError("407"),
        httpx.LocalProtocolError("a line break in a header"),
        RuntimeError("a fault of ours"),
    )

    def request(self, method, url, content, name, headers):
        inner = RecordingTransport(verify=NO_TLS)
        inner.sender = self
        transport = with_httpx.IdempotentTransport(inner, policy=self.policy, sleep=self.sleep)
        with httpx.Client(transport=transport, timeout=self.timeout) as client:
            return client.request(method, url, content=content, headers=headers, extensions=named(name))

    def send_twice(self, url, headers=None):
        """Send one request object twice."""
        with httpx.Client(transport=with_httpx.IdempotentTransport(sleep=self.sleep)) as client:
            request = client.build_request("POST", url, content=b"{}", headers=headers)
            for _ in range(2):
                client.send(request, follow_redirects=True)

    def fetch_status(self, url, key):
        with httpx.Client(transport=with_httpx.IdempotentTransport(), base_url=url) as client:
            return with_httpx.fetch_key_status(client, "/keys/charges/", key)


def named(call):
    return {"idempotency_name": call} if call else {}


async def no_sleep(seconds): ...


class AsyncHttpx(Httpx):
    def request(self, method, url, content, name, headers):
        async def sleep(seconds):
            self.sleep(seconds)

        async def send():
            inner = AsyncRecordingTransport(verify=NO_TLS)
            inner.sender = self
            transport = with_httpx.AsyncIdempotentTransport(inner, policy=self.policy, sleep=sleep)
            async with httpx.AsyncClient(transport=transport, timeout=self.timeout) as client:
                return await client.request(method, url, content=content, headers=headers, extensions=named(name))

        return asyncio.run(send())

    def send_twice(self, url, headers=None):
        async def send():
            transport = with_httpx.AsyncIdempotentTransport(sleep=no_sleep)
            async with httpx.AsyncClient(transport=transport) as client:
                request = client.build_request("POST", url, content=b"{}", headers=headers)
                for _ in range(2):
                    await client.send(request, follow_redirects=True)

        asyncio.run(send())

    def fetch_status(self, url, key):
        async def fetch():
            async with httpx.AsyncClient() as client:
                return await with_httpx.afetch_key_status(client, f"{url}/keys/charges/", key)

        return asyncio.run(fetch())


def session_with(adapter):
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", adapter)
    return session


class Requests(Sender):
    status_error = requests.HTTPError
    unresolved = with_requests.UnresolvedRequestError
    transport_errors = requests.RequestException
    undecodable = requests.exceptions.ContentDecodingError
    cut = requests.ConnectionError("cut")
    hopeless = (
        requests.exceptions.ProxyError("407"),
        requests.exceptions.InvalidURL("no host"),
        requests.exceptions.SSLError("of another host"),
        RuntimeError("a fault of ours"),
    )
    hopeless[2].__context__ = ssl.SSLCertVerificationError("hostname mismatch")

    def request(self, method, url, content, name, headers):
        adapter = IdempotentRecordingAdapter(policy=self.policy, sleep=self.sleep)
        adapter.sender = self
        if name:
            headers[with_requests.NAME_HEADER] = name
        with session_with(adapter) as session:
            return session.request(method, url, data=content, headers=headers, timeout=self.timeout)

    def send_twice(self, url, headers=None):
        with session_with(with_requests.IdempotentAdapter(sleep=self.sleep)) as session:
            request = session.prepare_request(requests.Request("POST", url, data=b"{}", headers=headers))
            for _ in range(2):
                session.send(request)

    def fetch_status(self, url, key):
        with session_with(with_requests.IdempotentAdapter()) as session:
            return with_requests.fetch_key_status(session, f"{url}/keys/charges/", key)


SENDERS = {"httpx": Httpx, "async": AsyncHttpx, "requests": Requests}
