"""What every client does, against a server that fails in every way: one key, the same bytes, the waits asked for."""

import pickle
import re
import time
from datetime import UTC, datetime
from uuid import RFC_4122, UUID

import pytest

from idempotency.contrib import retrying
from idempotency.contrib.retrying import RetryPolicy
from idempotency.http.problems import PROFILES, STATUS_HEADER
from idempotency.identity.keys import KeyStatus
from tests.contrib.senders import SENDERS
from tests.contrib.servers import answer, cut, cut_in_the_middle, hang, problem, serving


def test_a_request_is_given_a_key_of_its_time_and_74_random_bits(sender, server):
    before = time.time_ns() // 1_000_000
    answers = [sender.send(server.url) for _ in range(2)]
    made = [UUID(str(key)) for key in server.keys]
    assert [(key.version, key.variant) for key in made] == [(7, RFC_4122)] * 2
    assert before <= made[0].int >> 80 <= made[1].int >> 80 <= time.time_ns() // 1_000_000
    assert len({key.int & (1 << 62) - 1 for key in made}) == 2
    assert [answer.key for answer in answers] == server.keys


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_key_of_the_callers_own_is_kept(sender, server, method):
    server.script = [cut]
    answer = sender.send(server.url, method=method, headers={"idempotency-key": '"order-71"'})
    assert (answer.status, server.keys) == (201, ['"order-71"', '"order-71"'])


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_other_methods_pass_through_untouched(sender, server, method):
    server.script = [answer(503, retry_after="1")]
    assert sender.send(server.url, method=method).status == 503
    assert (server.keys, sender.waits) == ([None], [])
    server.script = [cut]
    with pytest.raises(sender.transport_errors) as raised:
        sender.send(server.url, method=method)
    assert not isinstance(raised.value, sender.unresolved)
    assert server.keys == [None, None]


def test_the_methods_are_configurable(sender, server):
    sender.policy = RetryPolicy(methods=("PUT",))
    server.script = [cut]
    sender.send(server.url, method="PUT")
    sender.send(server.url, method="POST")
    assert [request.method for request in server.requests] == ["PUT", "PUT", "POST"]
    first, retry, other = server.keys
    assert first == retry
    assert (first is None, other) == (False, None)


#: Answers after which another attempt learns no more, although a server that says nothing of the key would be retried.
KNOWN = [("executed", 202), ("executed", 409), ("replayed", 503), ("recorded", 503), ("reused", 409), ("ignored", 503)]

RETRIED = {
    "cut before the answer": cut,
    "cut in the middle of the body": cut_in_the_middle,
    "in progress": problem(409, "idempotency_in_progress"),
    "in progress, with Retry-After": problem(409, "idempotency_in_progress", retry_after="1"),
    "in progress, by profile stripe": answer(409, b'{"error": {"code": "idempotency_key_in_use"}}'),
    "in progress, by profile acp": answer(409, b'{"code": "idempotency_in_flight"}'),
    "in progress, accepted": answer(202, idempotency_status="in-progress", retry_after="1"),
    "not recorded": answer(503, idempotency_status="not-recorded"),
    "refused above the handler": answer(429, idempotency_status="unknown"),
    "a conflict of another server that passes": answer(409, b"no json", retry_after="1"),
    **{str(status): answer(status) for status in (408, 425, 429, 502, 503, 504)},
}
RETURNED = {
    "outcome unknown": problem(409, "idempotency_outcome_unknown"),
    "outcome unknown, whatever the headers say": problem(409, "idempotency_outcome_unknown", retry_after="1"),
    "a conflict that stays": answer(409, b'["no problem"]'),
    "another conflict that stays": answer(409, b'{"error": "no problem"}'),
    **{f"{known} {status}": answer(status, idempotency_status=known) for known, status in KNOWN},
    "a conflict nested too deeply": answer(409, b"[" * 100_000),
    **{str(status): answer(status) for status in (200, 201, 202, 400, 401, 402, 403, 404, 410, 422, 500, 501)},
}


@pytest.mark.parametrize("fault", RETRIED.values(), ids=RETRIED)
def test_what_settles_nothing_is_retried_with_the_same_key_and_bytes(sender, server, fault):
    server.script = [fault, fault]
    got = sender.send(server.url + "/charges/?a=b", b'{"amount":  1}', headers={"X-Trace": "t"})
    assert (got.status, got.body) == (201, b'{"id": 1}')
    assert (len(sender.waits), len(server.requests), len(set(server.keys))) == (2, 3, 1)
    sent = [(r.method, r.path, r.body, r.headers["x-trace"], r.headers["content-length"]) for r in server.requests]
    assert sent == [("POST", "/charges/?a=b", b'{"amount":  1}', "t", "14")] * 3


@pytest.mark.failure_97
@pytest.mark.parametrize("fault", RETURNED.values(), ids=RETURNED)
def test_every_other_answer_is_returned_as_it_is(sender, server, fault):
    server.script = [fault]
    got = sender.send(server.url)
    assert (len(server.requests), sender.waits) == (1, [])
    assert got.status != 201 or got.body == b'{"id": 1}'


def test_the_clients_know_the_names_of_the_server():
    in_progress = {profile.answers["idempotency_in_progress"].code for profile in PROFILES.values()}
    assert (STATUS_HEADER, in_progress) == (retrying.STATUS_HEADER, retrying.IN_PROGRESS_CODES)


#: What a request object gets first, and whether it is then sent with the same key.
SENT_AGAIN = {
    "after its outcome": (answer(201), False),
    "after a recorded refusal": (answer(402, idempotency_status="executed"), False),
    "after a fault of the server": (answer(500), True),
    "after a login page": (answer(200, idempotency_status="unknown"), True),
    "after a refusal": (answer(403), True),
    "after its outcome elsewhere": (answer(307, location="/elsewhere"), False),
}


@pytest.mark.parametrize(("first", "has_first_key"), SENT_AGAIN.values(), ids=SENT_AGAIN)
def test_a_request_object_gets_another_key_after_its_outcome(sender, server, first, has_first_key):
    is_redirected = first is SENT_AGAIN["after its outcome elsewhere"][0]
    server.script = [first, *[answer(201)] * is_redirected, cut]
    sender.send_twice(server.url)
    one, *other = server.keys[is_redirected:]
    assert server.keys[0] == one
    assert [key == one for key in other] == [has_first_key] * 2
    assert len(set(other)) == 1


def test_a_request_object_keeps_a_key_that_its_caller_set(sender, server):
    sender.send_twice(server.url, headers={"Idempotency-Key": "order-71"})
    assert server.keys == ["order-71"] * 2


def test_a_request_that_times_out_is_retried(sender, server):
    server.script = [hang]
    sender.timeout = 1.0
    assert sender.send(server.url).status == 201
    assert len(set(server.keys)) == 1
    assert len(server.requests) >= 2


def test_a_server_that_is_down_is_tried_again(sender):
    with serving() as gone:
        pass
    sender.policy = RetryPolicy(attempts=3)
    error = sender.give_up(gone.url)
    assert (error.response, error.attempts, len(sender.waits)) == (None, 3, 2)


def test_the_statuses_are_configurable(sender, server):
    sender.policy = RetryPolicy(statuses={500})
    server.script = [answer(500), answer(503)]
    assert sender.send(server.url).status == 503
    assert len(server.requests) == 2


def test_waits_are_drawn_from_a_range_that_doubles_up_to_a_bound(sender, server):
    sender.policy = RetryPolicy(attempts=40, total=10_000, first_wait=1.0, longest_wait=4.0)
    server.script = [cut] * 39
    assert sender.send(server.url).status == 201
    assert all(0 <= wait <= high for wait, high in zip(sender.waits, [1.0, 2.0, *[4.0] * 37], strict=True))
    assert max(sender.waits) > 2.0  # fails once in 2**37
    assert len(set(sender.waits)) > 30


def test_a_retry_after_is_waited_for_and_a_little_longer(sender, server):
    server.script = [
        answer(429, retry_after="7"),
        problem(409, "idempotency_in_progress", retry_after="3"),
        # Eight seconds later than what the server says is now, whatever our own clock says.
        answer(503, retry_after="Wed, 21 Oct 2026 07:28:08 GMT"),
        answer(503, retry_after="Wed, 21 Oct 2026 07:27:00 GMT"),
        answer(503, retry_after="soon"),
        cut,
    ]
    sender.policy = RetryPolicy(first_wait=0.25, longest_wait=1.0)
    assert sender.send(server.url).status == 201
    asked = [(7, 7.25), (3, 3.5), (8, 9), (0, 1), (0, 1), (0, 1)]
    assert all(least < wait <= most for wait, (least, most) in zip(sender.waits, asked, strict=True)), sender.waits


def test_a_retry_after_that_does_not_fit_ends_it_at_once(sender, server):
    sender.policy = RetryPolicy(total=60)
    server.script = [answer(503, retry_after="3600")]
    error = sender.give_up(server.url)
    assert (error.attempts, sender.waits, error.response.headers["Retry-After"]) == (1, [], "3600")


def test_the_total_time_is_bounded(sender, server):
    sender.policy = RetryPolicy(total=35, attempts=100, longest_wait=1.0)
    server.script = [answer(503, retry_after="10")] * 100
    sender.give_up(server.url)
    assert len(server.requests) == 4
    assert sum(sender.waits) < 35


def test_no_attempt_waits_for_longer_than_what_is_left(sender, server):
    sender.policy = RetryPolicy(total=1000, longest_wait=1.0)
    sender.timeout = 5000.0
    server.script = [answer(503, retry_after="400"), answer(503, retry_after="400")]
    assert sender.send(server.url).status == 201
    assert all(allowed <= left for allowed, left in zip(sender.allowed, [1000, 600, 200], strict=True)), sender.allowed


def test_a_shorter_timeout_of_the_callers_own_is_kept(sender, server):
    server.script = [answer(503)]
    sender.send(server.url)
    assert sender.allowed == [sender.timeout] * 2


@pytest.mark.parametrize(("kind", "error"), [(kind, error) for kind in SENDERS for error in SENDERS[kind].hopeless])
def test_an_error_that_no_retry_can_cure_is_raised_unchanged(server, kind, error):
    sender = SENDERS[kind](errors=[error])
    with pytest.raises(type(error)) as raised:
        sender.send(server.url)
    assert (raised.value, sender.waits, server.requests) == (error, [], [])


def test_such_an_error_leaves_the_outcome_of_the_attempt_before_unknown(sender, server):
    for error in sender.hopeless[:2]:
        sender.errors, sender.waits = [sender.cut, error], []
        unresolved = sender.give_up(server.url)
        assert (unresolved.__cause__, unresolved.attempts, len(sender.waits)) == (error, 2, 1)


def test_the_final_error_contains_the_key_to_resume_with(sender, server):
    sender.policy = RetryPolicy(attempts=3)
    server.script = [answer(503, b'{"busy": true}'), cut, cut]
    error = sender.give_up(server.url + "/charges/?token=secret")
    assert isinstance(error, sender.transport_errors)
    assert [error.key] * 3 == server.keys
    assert (error.attempts, error.request.url) == (3, server.url + "/charges/?token=secret")
    assert (error.response.status_code, error.response.json()) == (503, {"busy": True})
    assert error.response.request.headers["Idempotency-Key"] == error.key
    assert isinstance(error.__cause__, sender.transport_errors)
    message = str(error)
    assert re.search(r"POST http://127.0.0.1/charges/: the outcome is unknown after 3 attempt", message)
    assert "Resend it later with the same Idempotency-Key" in message
    assert "secret" not in message
    assert error.key not in message


def test_a_response_that_cannot_be_decoded_counts_by_its_status(sender, server):
    sender.policy = RetryPolicy(attempts=2)
    broken = {"body": b"not gzip", "content_encoding": "gzip"}
    server.script = [answer(503, **broken), answer(503, **broken)]
    assert (sender.give_up(server.url).response.status_code, len(server.requests)) == (503, 2)
    for status in (201, 409):
        server.script = [answer(status, **broken)]
        with pytest.raises(sender.undecodable):
            sender.send(server.url)
    assert len(server.requests) == 4


def test_the_error_survives_being_sent_to_another_process(sender, server):
    sender.policy = RetryPolicy(attempts=2)
    server.script = [answer(503), cut]
    error = sender.give_up(server.url)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.key, copy.attempts) == (str(error), error.key, 2)


def test_a_body_that_can_be_read_only_once_is_sent_again(sender, server):
    server.script = [cut, answer(503)]

    def parts():
        yield b"one "
        yield b"two"

    async def async_parts():
        for part in parts():
            yield part

    is_async = type(sender).__name__ == "AsyncHttpx"
    assert sender.send(server.url, async_parts() if is_async else parts()).status == 201
    assert [request.body for request in server.requests] == [b"one two"] * 3


@pytest.mark.parametrize("bounds", [{"attempts": 0}, {"total": 0}, {"first_wait": -1}, {"longest_wait": 0}])
def test_a_bound_that_bounds_nothing_is_refused(bounds):
    with pytest.raises(ValueError, match=f"RetryPolicy.{next(iter(bounds))} must be above 0"):
        RetryPolicy(**bounds)


DONE = (
    b'{"status": "completed", "response_status": 201, "created_at": "2026-11-22T10:00:00Z",'
    b' "completed_at": "2026-11-22T10:00:01.500000Z", "expires_at": "2026-11-25T10:00:01.500000Z"}'
)


def test_a_client_learns_what_has_become_of_its_key(server, sender):
    server.script = [
        answer(200, DONE),
        answer(200, b'{"status": "completed", "created_at": "2026-11-22T11:00:00+01:00"}'),
        answer(200, b'{"status": "in_progress", "created_at": null}', retry_after="2"),
        answer(404),
        *[answer(200, wrong) for wrong in (b"<html>", b"[]", b'{"status": 1}')],
    ]
    told = sender.fetch_status(server.url, '"k"')
    at = datetime(2026, 11, 22, 10, tzinfo=UTC)
    assert told == KeyStatus(
        "completed",
        response_status=201,
        created_at=at,
        completed_at=at.replace(second=1, microsecond=500_000),
        expires_at=at.replace(day=25, second=1, microsecond=500_000),
    )
    assert sender.fetch_status(server.url, '"k"').created_at == at  # of any offset
    assert sender.fetch_status(server.url, '"k"') == KeyStatus("in_progress", retry_after=2.0)
    with pytest.raises(sender.status_error):
        sender.fetch_status(server.url, '"k"')
    for _ in range(3):
        with pytest.raises(ValueError, match=r"status of a key|Expecting value"):
            sender.fetch_status(server.url, '"k"')
    assert {(sent.method, sent.path, sent.key) for sent in server.requests} == {("GET", "/keys/charges/", '"k"')}
