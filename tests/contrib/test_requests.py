"""What is requests' own: its bodies, its timeouts, the name in a header that is never sent, pickled sessions."""

import io
import pickle

import pytest
import requests
from urllib3.util import Timeout

from idempotency.contrib.requests import NAME_HEADER, IdempotentAdapter, RetryPolicy, UnresolvedRequestError
from tests.contrib.senders import PATIENCE, session_with
from tests.contrib.servers import answer, cut, cut_in_the_middle, hang


@pytest.fixture
def session(waits):
    with session_with(IdempotentAdapter(sleep=waits.append)) as session:
        yield session


class Forgetful(io.RawIOBase):
    """A file that can't be rewound and says nothing of its position."""

    def __init__(self):
        self.parts = [b"one ", b"two", b""]

    def readinto(self, buffer):
        part = self.parts.pop(0)
        buffer[: len(part)] = part
        return len(part)

    def readable(self):
        return True

    def tell(self):
        raise OSError


def opened_at_its_fourth_byte():
    file = io.BytesIO(b"0123one two")
    file.seek(4)
    return file


BODIES = {
    "bytes": lambda: b"one two",
    "text": lambda: "one two",
    "nothing": lambda: None,
    "form": lambda: {"one": "two"},
    "parts": lambda: iter([b"one ", "two"]),
    "file": lambda: io.BytesIO(b"one two"),
    "text file": lambda: io.StringIO("one two"),
    "file that was read from": opened_at_its_fourth_byte,
    "file without a position": Forgetful,
}


@pytest.mark.parametrize("name", BODIES)
def test_each_attempt_sends_the_same_bytes(session, server, name):
    make = BODIES[name]
    server.script = [cut, answer(503), answer(307, location="/elsewhere"), cut]
    expected = {"nothing": b"", "form": b"one=two"}.get(name, b"one two")
    if make is Forgetful:  # requests itself refuses to send it to another place
        server.script[2:] = []
    assert session.post(server.url, data=make(), timeout=PATIENCE).status_code == 201
    assert {request.body for request in server.requests} == {expected}
    assert len(set(server.keys)) == 1
    assert len(server.requests) == (3 if make is Forgetful else 5)


@pytest.mark.parametrize("make", [lambda: io.BytesIO(b"one two"), opened_at_its_fourth_byte], ids=["start", "middle"])
def test_a_challenged_request_is_the_same_operation(session, server, make):
    server.script = [cut, answer(401, www_authenticate='Digest realm="r", nonce="n", qop="auth"'), cut]
    auth = requests.auth.HTTPDigestAuth("a", "b")
    assert session.post(server.url, data=make(), auth=auth, timeout=PATIENCE).status_code == 201
    assert {request.body for request in server.requests} == {b"one two"}
    assert (len(server.requests), len(set(server.keys))) == (4, 1)


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_the_name_of_a_call_is_never_sent(session, server, method):
    headers = {NAME_HEADER: b"provider.charge"}
    assert session.request(method, server.url, headers=headers, timeout=PATIENCE).status_code == 201
    assert NAME_HEADER.lower() not in server.requests[0].headers


def test_a_key_in_bytes_is_a_key(waits, server):
    server.script = [cut]
    adapter = IdempotentAdapter(policy=RetryPolicy(attempts=1), sleep=waits.append)
    with session_with(adapter) as session, pytest.raises(UnresolvedRequestError) as raised:
        session.post(server.url, headers={"Idempotency-Key": b"order-71"}, timeout=PATIENCE)
    assert (raised.value.key, server.keys) == ("order-71", ["order-71"])


def test_an_answer_that_is_to_be_streamed_is_handed_over_unread(session, server):
    server.script = [answer(503), answer(409, b'{"code": "idempotency_in_progress"}'), cut, cut_in_the_middle]
    with session.post(server.url, stream=True, timeout=PATIENCE) as response:
        assert response.status_code == 201
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            response.content  # noqa: B018
    assert len(server.requests) == 4


@pytest.mark.parametrize("timeout", [None, 1000, 0.5, (1000, None), Timeout(0.5)], ids=repr)
def test_every_form_of_a_timeout_is_bounded(waits, server, timeout):
    server.script = [hang]
    adapter = IdempotentAdapter(policy=RetryPolicy(total=1, attempts=1), sleep=waits.append)
    with session_with(adapter) as session, pytest.raises(UnresolvedRequestError) as raised:
        session.post(server.url, timeout=timeout)
    assert isinstance(raised.value.__cause__, requests.ReadTimeout)


def test_a_session_can_be_sent_to_another_process(server):
    policy = RetryPolicy(attempts=2, first_wait=0.001)
    with session_with(IdempotentAdapter(policy=policy, pool_maxsize=3)) as session:
        copy = pickle.loads(pickle.dumps(session))
    server.script = [cut]
    with copy:
        assert copy.post(server.url, timeout=PATIENCE).status_code == 201
        adapter = copy.get_adapter("http://")
    assert (adapter.policy, adapter._pool_maxsize) == (policy, 3)
