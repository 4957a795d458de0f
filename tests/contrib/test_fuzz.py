"""No answer of a server and no header of a message gives an error that the unprotected twin does not have.

``--count`` is how many inputs each client and the task get.
"""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from typing import Any

import httpx
import pytest
import requests
import urllib3
from celery.exceptions import Ignore, Reject
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kombu import Connection
from requests.adapters import HTTPAdapter

from idempotency.contrib import httpx as with_httpx
from idempotency.contrib import requests as with_requests
from idempotency.contrib import retrying
from idempotency.contrib.celery import deliveries, messages
from idempotency.contrib.retrying import RetryPolicy
from idempotency.identity.keys import KeyStatus
from testproject.celery import app
from tests.contrib import consumers
from tests.contrib.deliveries import Inbox, acting
from tests.contrib.senders import session_with
from tests.results import recording

pytestmark = pytest.mark.once

odd_text = st.one_of(
    st.text(st.characters(max_codepoint=0xFF, blacklist_characters="\r\n\0"), max_size=40),
    st.sampled_from(["-1", "1e9", "9" * 5_000, "\xb2", "inf", "nan", "Fri, 31 Dec 9999 23:59:59 -1200", "0", "3"]),
    st.sampled_from(["Mon, 01 Jan 0001 00:00:00 +1400", "Thu, 32 Foo 2026 99:99:99 +99999999", "2026-01-01", ""]),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), odd_text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
DEEP = [b"[" * depth + b"]" * depth for depth in (500, *range(800, 1000, 15), 100_000)]
members = st.sampled_from(["code", "status", "created_at", "expires_at", "response_status", "title"])
bodies = st.one_of(
    st.dictionaries(members, json_values | st.sampled_from(["in_progress", "idempotency_in_progress"])).map(
        lambda value: json.dumps(value).encode()
    ),
    st.tuples(members.map(str.encode), st.sampled_from(DEEP)).map(lambda pair: b'{"status": "x", "%b": %b}' % pair),
    st.binary(max_size=60) | st.sampled_from([*DEEP, b'{"status": "x"}', b"\xff\xfe{\0", b"\x1f\x8b\x08\0"]),
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "Retry-After": odd_text,
        "Date": odd_text,
        "Content-Encoding": st.sampled_from(["gzip", "deflate", "nonsense", "gzip, gzip"]),
        "Content-Type": st.sampled_from(["application/problem+json; charset=nonsense", "text/html; charset=utf-16"]),
    },
)
statuses = st.sampled_from([200, 201, 204, 400, *[409] * 5, 425, 429, 500, 503, 599])
answers = st.lists(st.tuples(statuses, headers, bodies), min_size=1, max_size=3)
Answers = list[tuple[int, dict[str, str], bytes]]


def options(count, default=150):
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return hypothesis_settings(max_examples=count or default, deadline=None, suppress_health_check=suppressed)


POLICY = RetryPolicy(attempts=3)


def sleep(seconds):
    assert 0 <= seconds < POLICY.total


def by_httpx(script, *, protected):
    play = itertools.cycle(script)

    def handle(request):
        status, sent, body = next(play)
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
        return httpx.Response(status, headers=encoded, stream=httpx.ByteStream(body))

    inner = httpx.MockTransport(handle)
    transport = with_httpx.IdempotentTransport(inner, policy=POLICY, sleep=sleep) if protected else inner
    return httpx.Client(transport=transport)


class Played(HTTPAdapter):
    play: Any

    def send(self, request, *args, **options):
        status, sent, body = next(self.play)
        raw = urllib3.HTTPResponse(io.BytesIO(body), sent, status, preload_content=False)
        return self.build_response(request, raw)


class IdempotentPlayed(with_requests.IdempotentAdapter, Played): ...


def by_requests(script, *, protected):
    adapter = IdempotentPlayed(policy=POLICY, sleep=sleep) if protected else Played()
    adapter.play = itertools.cycle(script)
    return session_with(adapter)


def outcome(act, *arguments, **options):
    try:
        answer = act(*arguments, **options)
    except Exception as error:  # noqa: BLE001 - compared with the twin's error
        return type(error)
    return answer if isinstance(answer, KeyStatus) else (answer.status_code, answer.content)


CLIENTS = {"httpx": (by_httpx, with_httpx), "requests": (by_requests, with_requests)}
URL = "http://server/"


def compare(client, module, count):
    """What became of the requests. Either the outcome is open, or it is the twin's with one of the answers."""
    became = Counter[str]()

    @options(count)
    @example(script=[(201, {}, b"{}")])
    @example(script=[(503, {"Retry-After": "soon"}, b"")])
    @given(script=answers)
    def try_one(script):
        twins = [outcome(client([each], protected=False).post, URL, data={"a": "1"}) for each in script]
        got = outcome(client(script, protected=True).post, URL, data={"a": "1"})
        assert got in [*twins, module.UnresolvedRequestError], (got, twins)
        twin = outcome(lambda: KeyStatus(str(client(script, protected=False).get(URL).json())[:1]))
        status = outcome(module.fetch_key_status, client(script, protected=True), URL, "k")
        if not isinstance(status, KeyStatus) and status != twin:
            assert issubclass(status, (ValueError, httpx.HTTPStatusError, requests.HTTPError)), (status, twin)
        became[got.__name__ if isinstance(got, type) else "answered"] += 1

    try_one()
    return became


@pytest.mark.parametrize("name", CLIENTS)
def test_no_answer_gives_an_error_that_the_bare_client_does_not_give(name, count, seed):
    with recording("fuzz: answers", handler=name, seed=seed) as figures:
        became = compare(*CLIENTS[name], count)
        figures |= {"inputs": became.total(), "answers": dict(became)}
    assert {"answered", "UnresolvedRequestError"} <= became.keys()


def test_a_client_that_trusts_the_server_is_found(monkeypatch):
    monkeypatch.setattr(retrying, "retry_after", lambda headers: float(headers.get("Retry-After", 0)))
    with pytest.raises(AssertionError):
        compare(*CLIENTS["httpx"], None)


names = st.sampled_from(
    [value for name, value in vars(messages).items() if name.endswith("_HEADER")] + [deliveries.REASON_HEADER, "trace"]
)
odd_headers = st.dictionaries(names, json_values | st.sampled_from(["k", "1", 10**400, -1, True, "\0", "\ud800"]))


def consume(monkeypatch, count):
    """Deliver messages with odd headers to a task and its twin. Returns the count of each type of result."""
    became = Counter[str]()
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")
    monkeypatch.setattr(app, "_pool", None)
    monkeypatch.setattr(app.amqp, "_producer_pool", None)
    monkeypatch.setattr(deliveries, "publish_again", lambda *_, headers, **__: json.dumps(headers))
    with Connection("memory://") as connection:
        inbox = Inbox(app, connection)
        numbers = itertools.count()

        @options(count, 100)
        @example(odd={messages.ATTEMPTS_HEADER: "many"})
        @example(odd={messages.KEY_HEADER: -1})
        @given(odd=odd_headers)
        def try_one(odd):
            acting("twin", lambda task: None)
            inbox.publish(consumers.plain, "twin", headers=dict(odd))
            twin = inbox.deliver()
            inbox.publish(consumers.send, f"message {next(numbers)}", headers=dict(odd))
            got = inbox.deliver()
            if isinstance(got.result, BaseException) and not isinstance(twin.result, BaseException):
                assert isinstance(got.result, (Ignore, Reject)), got
            became[type(got.result).__name__] += 1

        try_one()
    return became


@pytest.mark.django_db(transaction=True)
def test_no_message_header_causes_an_error_that_a_plain_task_does_not(monkeypatch, count, seed):
    with recording("fuzz: messages", seed=seed) as figures:
        became = consume(monkeypatch, count)
        figures |= {"inputs": became.total(), "answers": dict(became)}
    assert {"dict", "Ignore"} <= became.keys()


@pytest.mark.django_db(transaction=True)
def test_the_fuzz_finds_a_task_that_trusts_a_header(monkeypatch):
    monkeypatch.setattr(deliveries, "count_of", lambda headers, name: int(headers.get(name, 0)))
    with pytest.raises(AssertionError):
        consume(monkeypatch, None)
