"""Clients of the views, and what a test checks afterwards: responses, effects and records."""

import json
from contextlib import contextmanager
from datetime import timedelta

from asgiref.sync import async_to_sync
from django.db import connection
from django.test import AsyncClient, Client
from django.test.client import encode_multipart

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.factories import TokenFactory
from tests.records import from_now

FORM = "application/x-www-form-urlencoded"

#: The problems of the wire contract, and the status of each.
PROBLEMS = {
    "idempotency_key_missing": 400,
    "idempotency_key_invalid": 400,
    "idempotency_key_expired": 400,
    "idempotency_payload_invalid": 400,
    "idempotency_account_required": 401,
    "idempotency_in_progress": 409,
    "idempotency_outcome_unknown": 409,
    "idempotency_body_gone": 409,
    "idempotency_key_reused": 422,
    "idempotency_account_invalid": 500,
    "idempotency_payload_unreadable": 500,
    "idempotency_response_unrecordable": 500,
    "idempotency_outcome_unreadable": 500,
    "idempotency_transaction_broken": 500,
    "idempotency_outer_transaction": 500,
    "idempotency_unavailable": 503,
}


class Caller:
    """A client with one account. It gets the responses that a real client would get: a crash is a 500."""

    def __init__(self, user, transport="wsgi"):
        self.user = user
        self.token = None if user is None else TokenFactory(user=user)
        self.transport = transport

    def request(
        self, method, url="/", data=None, *, key=None, content_type="application/json", headers=None, **environment
    ):
        sent = dict(headers or {})
        if self.token is not None:
            sent["Authorization"] = f"Token {self.token.key}"
        if key is not None:
            sent["Idempotency-Key"] = key
        body = data if isinstance(data, bytes) else json.dumps({} if data is None else data).encode()
        arguments = {"data": body, "content_type": content_type, "headers": sent, **environment}
        if self.transport == "asgi":
            return async_to_sync(_request_async)(method, url, arguments)
        return Client(raise_request_exception=False).generic(method, url, **arguments)

    def post(self, url="/", data=None, **options):
        return self.request("POST", url, data, **options)

    def get(self, url="/", **options):
        return self.request("GET", url, b"", **options)


async def _request_async(method, url, arguments):
    return await AsyncClient(raise_request_exception=False).generic(method, url, **arguments)


def multipart(data, boundary="one"):
    """The arguments of a request that sends ``data``, which may contain files, as a multipart form."""
    return {"data": encode_multipart(boundary, data), "content_type": f"multipart/form-data; boundary={boundary}"}


def effects():
    return Transfer.objects.count()


def records():
    return list(IdempotencyRecord.objects.order_by("pk").values_list("status", "attempt"))


def problem_code(response):
    """Check that a response is a problem as the wire contract defines it. Returns its code."""
    assert response["Content-Type"] == "application/problem+json"
    problem = json.loads(response.content)
    assert problem.keys() == {"type", "title", "status", "detail", "code", "retryable"}
    assert all(isinstance(problem[member], str) and problem[member] for member in ("type", "title", "detail"))
    code = problem["code"]
    assert problem["retryable"] == response.has_header("Retry-After")
    assert problem["status"] == response.status_code == PROBLEMS[code]
    return code


def replayed(caller, url="/", data=None, *, wrote=1, **options):
    """Make a request and its retry, which is replayed without an effect. Returns the two responses."""
    sent = {"method": "POST", "key": "k", **options}
    before = effects()
    first = caller.request(url=url, data=data, **sent)
    assert "Idempotency-Replayed" not in first
    assert effects() == before + wrote
    replay = caller.request(url=url, data=data, **sent)
    assert replay["Idempotency-Replayed"] == "true"
    assert (replay.status_code, replay.content) == (first.status_code, first.content)
    assert effects() == before + wrote
    return first, replay


def assert_refused(caller, code, url="/", data=None, **options):
    """Make a request that is refused with a problem, has no effect and changes no record. Returns the response."""
    before = effects(), records()
    refused = caller.request(url=url, data=data, **{"method": "POST", **options})
    assert problem_code(refused) == code
    assert "Idempotency-Replayed" not in refused
    assert (effects(), records()) == before
    return refused


def refusals(caller):
    """Make a request, then use its key wrongly or too early. Returns the refusals by code."""
    sent = {"data": {"amount": 1}, "key": "k"}
    caller.post(**sent)
    refused = {
        "idempotency_key_missing": caller.post(),
        "idempotency_key_invalid": caller.post(key="a,b"),
        "idempotency_key_reused": caller.post(data={"amount": 2}, key="k"),
    }
    reopen_claim()
    refused["idempotency_in_progress"] = busy = caller.post(**sent)
    assert int(busy["Retry-After"]) >= 1
    assert busy["Idempotency-Key"] == refused["idempotency_key_reused"]["Idempotency-Key"] == "k"
    return refused


def assert_nothing_kept(caller, status, url="/", **options):
    """Make a request and its retry, which have no effect and leave a claim to retry. Returns the last response."""
    for attempt in (1, 2):
        answer = caller.post(url, key="k", **options)
        assert answer.status_code == status
        assert "Idempotency-Replayed" not in answer
        assert effects() == 0
        record = IdempotencyRecord.objects.get()
        assert (record.status, record.attempt, record.response_status) == (Status.RECOVERABLE, attempt, None)
        assert record.response_body is None
    return answer


def reopen_claim(*, lease=timedelta(seconds=60)):
    """Turn the one record back into a claim, as if its run had not ended."""
    IdempotencyRecord.objects.update(
        status=Status.IN_PROGRESS,
        lease_expires_at=from_now(lease),
        completed_at=None,
        response_status=None,
        response_headers=None,
        response_body=None,
    )


@contextmanager
def store_refusing(statement, error):
    """Make the database raise ``error`` for statements on the record's table that start with ``statement``."""

    def refuse(execute, sql, params, many, context):
        if sql.strip().upper().startswith(statement) and "idempotency_record" in sql:
            raise error
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        yield


def is_same(caller, first, second, **of_both):
    """Whether the second request is treated as a retry of the first, by its effects and its response.

    A request is given as its body (bytes), as its URL, or as the arguments of ``Caller.request``.
    """
    IdempotencyRecord.objects.all().delete()
    one, other = ({"method": "POST", "key": "k"} | of_both | _arguments(sent) for sent in (first, second))
    answer, _ = replayed(caller, **one)
    assert answer.status_code == 201, answer.content
    before = effects()
    again = caller.request(**other)
    assert effects() == before
    if again.status_code == 201:
        assert (again.content, again["Idempotency-Replayed"]) == (answer.content, "true")
        return True
    assert problem_code(again) == "idempotency_key_reused"
    return False


def _arguments(sent):
    if isinstance(sent, bytes):
        return {"data": sent}
    return {"url": sent} if isinstance(sent, str) else sent
