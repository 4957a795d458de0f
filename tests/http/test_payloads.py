"""When two requests under one key are the same request: JSON, forms, and what is neither."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from rest_framework.parsers import JSONParser

from idempotency import idempotent
from idempotency.identity import fingerprint
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import FORM, Caller, assert_refused, effects, multipart, replayed
from tests.http.sameness import Same
from tests.http.serving import Framework, Serve, drf_view
from tests.http.views import plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

AS_FORM = {"content_type": FORM}
AS_TEXT = {"content_type": "text/plain"}
LATIN = {"content_type": "application/json; charset=latin-1"}


# JSON


@pytest.mark.scenario(16)
@pytest.mark.failure_mode(42, 44)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            b'{"to": {"bank": [1], "name": "c"}, "a": 1}', b'{"a":1,\n\t"to":{"name":"c","bank":[1]}}', id="order"
        ),
        pytest.param(b'{"a": "\\u00fc"}', '{"a": "ü"}'.encode(), id="escapes"),
        pytest.param(b'{"a": 9007199254740992.5}', b'{"a":9007199254740992.50}', id="zeros"),
        pytest.param(b'{"a": 1, "a": 2}', b'{"a":1,"a":2}', id="a name twice"),
    ],
)
def test_json_that_says_the_same_is_the_same_request(
    same: Same, framework: Framework, first: bytes, second: bytes
) -> None:
    framework.serve()
    assert same(first, second)


@pytest.mark.failure_mode(42)
def test_values_that_look_alike_differ(same: Same, framework: Framework) -> None:
    framework.serve()
    alike = [b"1", b"1.0", b'"1"', b"true", b"null", b"[]", b"{}", b"[1, 2]", b"[2, 1]", b"0.0", b"-0.0"]
    alike += [b"9007199254740993", b"9007199254740992", b"9007199254740992.5", b"9007199254740993.0"]
    bodies = [b'{"a": %s}' % value for value in alike]
    bodies += [b'{"b": 1}', b'[{"a": 1}]', b'{"a": 1, "a": 2}', b'{"a": 2, "a": 1}', b'{"a": 2}']
    for first, second in pairwise(bodies):
        assert not same(first, second), (first, second)


@pytest.mark.failure_mode(68)
def test_no_pass_in_python_goes_over_a_json_body(
    same: Same, framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a million containers, over which such a pass takes seconds."""
    framework.serve()
    monkeypatch.setattr(fingerprint, "MAX_DEPTH", 2)  # what is written of method, route and query is no deeper
    assert same(b'{"amount": {"a": [[[]]]}}', b'{"amount": {"a":[[[]]]}}')


@pytest.mark.failure_mode(42)
def test_json_in_another_character_set_is_compared_by_what_drf_makes_of_it(same: Same, serve: Serve) -> None:
    serve(drf_view(idempotent("tests.latin")(plain_answer), parsers=[JSONParser]))
    assert same(b'{"a": "\xe9", "b": 1}', b'{"b": 1, "a": "\xe9"}', **LATIN)
    assert not same(b'{"a": "\xe9"}', b'{"a": "\xe8"}', **LATIN)


# What is not JSON


@pytest.mark.scenario(16)
@pytest.mark.parametrize(
    ("first", "second", "options", "expected"),
    [
        (b"{oops", b"{oops", {}, True),
        (b"{oops", b"{oops ", {}, False),
        (b"\xff", b"\xfe", {}, False),
        (b'{"a": 1}', b'{"a": 1}', AS_TEXT, True),
        (b'{"a": 1}', b'{"a":1}', AS_TEXT, False),
        # JSON by another name is JSON.
        (b'{"a": 1}', b'{"a":1}', {"content_type": "application/merge-patch+json; charset=utf-8"}, True),
    ],
)
def test_what_is_not_json_is_compared_byte_for_byte(
    same: Same, serve: Serve, first: bytes, second: bytes, options: Any, expected: bool
) -> None:
    serve(idempotent("tests.bytes")(plain_answer))
    assert same(first, second, **options) == expected


@pytest.mark.failure_mode(71)
def test_a_payload_that_no_parser_of_the_view_reads_is_left_to_the_handler(
    alice: Caller, serve: Serve, settings: Any
) -> None:
    """It need not look at it; if it does, it answers 415 as it would unprotected."""

    def handler(request: Any) -> Any:
        if "look" in request.query_params:
            assert request.data
        return plain_answer(request)

    serve(drf_view(idempotent("tests.unread")(handler), parsers=[JSONParser]))
    replayed(alice, data=b"a text", **AS_TEXT)
    assert_refused(alice, "idempotency_key_reused", data=b"another", key="k", **AS_TEXT)
    for _ in range(2):
        assert alice.post("/?look", data=b"a text", key="looks", **AS_TEXT).status_code == 415
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10  # no memory holds it either
    assert alice.post(data=b"x" * 100, key="large", **AS_TEXT).status_code == 415
    assert effects() == 1


# Forms


def upload(name: str = "a.txt", content: bytes = b"content") -> SimpleUploadedFile:
    return SimpleUploadedFile(name, content, content_type="text/plain")


@pytest.mark.scenario(16)
@pytest.mark.failure_mode(46)
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_multipart_form_is_compared_by_its_parts(same: Same, framework: Framework, method: str) -> None:
    framework.serve()
    first = {"method": method, **multipart({"amount": "1", "file": upload()})}
    retried = {"file": upload(), "amount": "1"}, "two"  # in another order, with a new boundary
    # Django parses the parts for POST only; a handler of PATCH parses them itself, so their bytes are compared.
    assert same(first, {**first, **multipart(*retried)}) == (method == "POST" or framework.name == "drf")
    for other in (
        {"amount": "2", "file": upload()},
        {"amount": "1", "file": upload(name="b.txt")},
        {"amount": "1", "file": upload(content=b"Content")},
        {"amount": "1", "other": upload()},
        {"amount": "1"},
        {"amount": "1", "file": "content"},
    ):
        assert not same(first, {**first, **multipart(other)})


@pytest.mark.scenario(16)
@pytest.mark.failure_mode(46)
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_form_is_compared_by_its_fields(same: Same, framework: Framework, method: str) -> None:
    framework.serve()
    form = {"method": method, **AS_FORM}
    assert same(b"a=1&b=2&b=3", b"b=2&b=3&a=1", **form)
    for other in (b"a=1&b=3&b=2", b"a=1&b=2", b"a=2&b=2&b=3", b"a=&b=2&b=3"):
        assert not same(b"a=1&b=2&b=3", other, **form)
    assert not same(b"a=", b"", **form)
    assert not same(b"a=2&%61=1", b"%61=1&a=2", **form)  # one name, however it is spelled


@pytest.mark.failure_mode(71)
def test_the_csrf_token_of_a_form_does_not_count(same: Same, framework: Framework) -> None:
    """It is masked anew each time that the form is shown."""
    framework.serve()
    first = b"csrfmiddlewaretoken=one&a=1"
    assert same(first, b"a=1&csrfmiddlewaretoken=two", **AS_FORM)
    assert same(first, b"a=1", **AS_FORM)
    assert not same(first, b"csrfmiddlewaretoken=one&a=2", **AS_FORM)
    parts = multipart({"csrfmiddlewaretoken": "one", "a": "1"})
    assert same(parts, multipart({"csrfmiddlewaretoken": "two", "a": "1"}))
    assert not same(parts, multipart({"csrfmiddlewaretoken": "one", "a": "2"}))


@pytest.mark.failure_mode(46)
def test_json_that_is_sent_as_a_form_is_compared_as_the_handler_reads_it(same: Same, serve: Serve) -> None:
    """What curl -d sends unless told otherwise. As form fields, a plus sign and a space are the same."""
    serve(idempotent("tests.curl")(plain_answer))
    assert not same(b'{"a": "1+2"}', b'{"a": "1 2"}', **AS_FORM)


@pytest.mark.failure_mode(68)
@pytest.mark.parametrize(
    "sent", [{"data": b"a=1" + 20 * b"&a=1"}, {"data": 20 * b"&"}, {"url": "?a=1" + 20 * "&a=1"}], ids=str
)
def test_a_form_with_more_fields_than_django_allows_is_djangos_400_and_claims_nothing(
    alice: Caller, framework: Framework, settings: Any, sent: dict[str, Any]
) -> None:
    def reading(request: Any) -> Any:
        _ = request.data if framework.name == "drf" else request.POST, request.GET
        return work(request)

    framework.serve_twins(reading)

    def statuses() -> list[int]:
        return [
            alice.post(**{**AS_FORM, **sent, "url": path + sent.get("url", ""), "key": "k"}).status_code
            for path in ("/", "/twin/")
        ]

    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 20
    assert statuses() == [400, 400]
    assert not IdempotencyRecord.objects.exists()
    Transfer.objects.all().delete()
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 21
    assert statuses() == [201, 201]


# Which algorithm


@pytest.mark.failure_mode(45)
def test_a_record_of_an_earlier_algorithm_is_checked_with_its_own(
    alice: Caller, framework: Framework, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework.serve()
    first = alice.post(data={"amount": 1}, key="old")

    def v2(payload: fingerprint.Payload) -> str:
        return f"v2 {fingerprint._canonical_v1(payload)}"

    monkeypatch.setattr(fingerprint, "_ALGORITHMS", {**fingerprint._ALGORITHMS, "v2": v2})
    monkeypatch.setattr(fingerprint, "CURRENT_VERSION", "v2")
    assert alice.post(data={"amount": 1}, key="old").content == first.content
    assert_refused(alice, "idempotency_key_reused", data={"amount": 2}, key="old")
    replayed(alice, data={"amount": 1}, key="new")
    assert IdempotencyRecord.objects.get(idempotency_key="new").request_hash.startswith("v2:")
    IdempotencyRecord.objects.update(request_hash="v9:" + 64 * "0")  # of an algorithm that nobody knows
    assert_refused(alice, "idempotency_key_reused", data={"amount": 1}, key="new")
