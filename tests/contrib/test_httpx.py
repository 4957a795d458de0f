"""What is httpx's own: streams, redirects, challenges, certificates, and other transports under ours."""

import asyncio
import ssl
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import httpx
import pytest

from idempotency.contrib.httpx import AsyncIdempotentTransport, IdempotentTransport, RetryPolicy, UnresolvedRequestError
from tests.contrib.senders import no_sleep
from tests.contrib.servers import answer, cut, cut_in_the_middle, serving


@pytest.fixture
def client(waits):
    with httpx.Client(transport=IdempotentTransport(sleep=waits.append), timeout=30) as client:
        yield client


BIG = b"x" * 300_000


def test_an_answer_can_be_streamed_though_it_was_read_within_the_attempt(client, server):
    server.script = [answer(503, BIG), answer(200, BIG)]
    with client.stream("POST", server.url) as response:
        assert b"".join(response.iter_raw(1000)) == BIG
    assert response.elapsed.total_seconds() > 0
    server.script = [answer(200, BIG)]
    with client.stream("POST", server.url) as response:
        assert b"".join(response.iter_bytes(1000)) == BIG


def test_an_answer_that_is_to_be_streamed_is_handed_over_unread(client, server):
    server.script = [answer(503), answer(409, b'{"code": "idempotency_in_progress"}'), cut, cut_in_the_middle]
    with client.stream("POST", server.url, extensions={"idempotency_stream": True}) as response:
        assert response.status_code == 201
        parts = response.iter_raw()
        assert next(parts) == b'{"id"'
        with pytest.raises(httpx.RemoteProtocolError):
            next(parts)
    assert len(server.requests) == 4


def test_an_answer_is_handed_over_unread_to_a_coroutine_too(server):
    async def run():
        async with (
            httpx.AsyncClient(transport=AsyncIdempotentTransport(sleep=no_sleep), timeout=30) as client,
            client.stream("POST", server.url, extensions={"idempotency_stream": True}) as response,
        ):
            parts = response.aiter_raw()
            assert await anext(parts) == b'{"id"'
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(parts)

    server.script = [answer(503), cut_in_the_middle]
    asyncio.run(run())
    assert len(server.requests) == 2


def test_the_connection_of_a_retried_answer_is_used_again(waits, server):
    server.script = [answer(503, BIG), answer(429, BIG), answer(201)]
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    inner = httpx.HTTPTransport(limits=limits)
    policy = RetryPolicy(attempts=3)
    with httpx.Client(transport=IdempotentTransport(inner, policy=policy, sleep=waits.append), timeout=30) as client:
        assert client.post(server.url).status_code == 201


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirected_request_is_the_same_operation(client, server, status):
    server.script = [answer(status, location="/elsewhere"), cut]
    assert client.post(server.url, content=b"{}", follow_redirects=True).status_code == 201
    assert [request.path for request in server.requests] == ["/", "/elsewhere", "/elsewhere"]
    assert len(set(server.keys)) == 1


def test_a_challenged_request_is_the_same_operation(client, server):
    server.script = [cut, answer(401, www_authenticate='Digest realm="r", nonce="n", qop="auth"')]
    assert client.post(server.url, content=iter([b"{}"]), auth=httpx.DigestAuth("a", "b")).status_code == 201
    assert [request.body for request in server.requests] == [b"{}"] * 3
    assert len(set(server.keys)) == 1


def test_the_timeouts_of_the_caller_are_left_as_they_were(client, server):
    response = client.post(server.url, timeout=httpx.Timeout(1000, read=None))
    assert response.request.extensions["timeout"] == {"connect": 1000, "read": None, "write": 1000, "pool": 1000}


def transport_of(*answers):
    """Another transport, which gives these answers one after the other."""
    transport = MagicMock(spec=httpx.BaseTransport)
    transport.handle_request.side_effect = answers
    return transport


def test_it_wraps_any_transport_and_closes_it(waits):
    """Also one that has read the answer, as a transport does that logs it."""
    busy = httpx.Response(503, content=b"busy")
    inner = transport_of(httpx.ReadTimeout("late"), httpx.Response(200, json={"id": 1}), busy)
    with httpx.Client(transport=IdempotentTransport(inner, sleep=waits.append), timeout=1000) as client:
        assert client.post("https://provider.test/", content=b"{}").json() == {"id": 1}
        once = IdempotentTransport(inner, policy=RetryPolicy(attempts=1))
        with pytest.raises(UnresolvedRequestError) as raised:
            once.handle_request(httpx.Request("POST", "https://provider.test/"))
    assert raised.value.response is busy
    inner.close.assert_called_once()
    first, retry, _ = [call.args[0] for call in inner.handle_request.call_args_list]
    assert first is not retry
    assert (retry.content, retry.headers) == (b"{}", first.headers)
    assert all(100 < seconds <= 120 for seconds in first.extensions["timeout"].values())


def test_one_transport_within_another_gives_up_once(waits):
    inner = transport_of(*[httpx.ReadError("cut")] * 3)
    transport = IdempotentTransport(inner, policy=RetryPolicy(attempts=3), sleep=waits.append)
    with (
        httpx.Client(transport=IdempotentTransport(transport, sleep=waits.append)) as client,
        pytest.raises(UnresolvedRequestError, match="3 attempt"),
    ):
        client.post("https://provider.test/")
    assert inner.handle_request.call_count == 3


def test_an_untrusted_certificate_is_not_retried(waits):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(__file__).with_name("certificate.pem"))  # with its key: it protects nothing
    with serving(tls=context) as server:
        transport = IdempotentTransport(sleep=waits.append)
        with httpx.Client(transport=transport, timeout=30) as client, pytest.raises(httpx.ConnectError) as raised:
            client.post(server.url)
    assert "CERTIFICATE_VERIFY_FAILED" in str(raised.value)
    assert (waits, server.requests) == ([], [])


def test_a_body_that_fails_to_be_read_is_never_sent(client, server):
    def parts():
        yield b"one"
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        client.post(server.url, content=parts())
    assert server.requests == []


def test_a_cancelled_request_ends_at_once(server):
    waiting = asyncio.Event()

    async def sleep(seconds):
        waiting.set()
        await asyncio.Event().wait()

    async def run():
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport(sleep=sleep), timeout=30) as client:
            request = asyncio.ensure_future(client.post(server.url))
            await waiting.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request

    server.script = [cut]
    asyncio.run(run())
    assert len(server.requests) == 1


def test_requests_that_run_at_once_do_not_disturb_each_other(server):
    """They share a transport, each with a policy's state of its own."""

    async def run():
        policy = RetryPolicy(attempts=30, total=10_000)
        transport = AsyncIdempotentTransport(policy=policy, sleep=lambda seconds: asyncio.sleep(0))
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            return list(await asyncio.gather(*[client.post(server.url, content=str(n)) for n in range(10)]))

    server.script = [cut, answer(503)] * 10
    assert {response.status_code for response in asyncio.run(run())} == {201}
    sent = Counter((request.body, request.key) for request in server.requests)
    assert len(sent) == len({body for body, _ in sent}) == len({key for _, key in sent}) == 10
    assert sent.total() == 30


def test_the_default_waits_use_the_running_event_loop(server):
    async def run():
        policy = RetryPolicy(first_wait=0.001, longest_wait=0.001)
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport(policy=policy), timeout=30) as client:
            return (await client.post(server.url)).status_code

    server.script = [cut]
    assert asyncio.run(run()) == 201
