"""No header of a message gives an error that the unprotected twin does not have.

``--count`` is how many inputs the task gets.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from celery.exceptions import Ignore, Reject
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kombu import Connection

from idempotency.contrib.celery import deliveries, messages
from testproject.celery import app
from tests.contrib import consumers
from tests.contrib.deliveries import Inbox, acting
from tests.results import recording

pytestmark = pytest.mark.once

odd_text = st.one_of(
    st.text(st.characters(max_codepoint=0xFF, blacklist_characters="\r\n\0"), max_size=40),
    st.sampled_from(["-1", "1e9", "9" * 5_000, "\xb2", "inf", "nan", "2026-01-01", "0", "3", ""]),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), odd_text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def options(count):
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return hypothesis_settings(max_examples=count or 100, deadline=None, suppress_health_check=suppressed)


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

        @options(count)
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
