"""When two requests under one key are the same request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.identity import fingerprint
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.sameness import Same
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.failure_mode(44)
@pytest.mark.scenario(16)
def test_the_order_of_names_and_white_space_do_not_count(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    first = b'{"amount": 1, "to": {"name": "carol", "bank": [1, 2]}}'
    assert same({"data": first}, {"data": b'{"to":{"bank":[1,2],"name":"carol"},\n\t"amount":1}'})
    assert same({"data": b'{"a": "\\u00fc"}'}, {"data": '{"a": "ü"}'.encode()})
    # The order of a list does count.
    assert not same({"data": first}, {"data": first.replace(b"[1, 2]", b"[2, 1]")})


@pytest.mark.failure_mode(42)
def test_values_that_look_alike_differ(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    alike = [b"1", b"1.0", b'"1"', b"true", b"null", b'""', b"[]", b"{}", b"[1]", b"0", b"false", b'"null"']
    bodies = [b'{"a": %s}' % value for value in alike]
    bodies += [b'{"a": 9007199254740993}', b'{"a": 9007199254740992}', b'{"a": 9007199254740992.0}', b"{}"]
    bodies += [b'{"a": 0.1}', b'{"a": 0.10000000000000002}', b'{"b": 1}', b'[{"a": 1}]', b'{"a": -0.0}', b'{"a": 0.0}']
    for place, first in enumerate(bodies):
        assert same({"data": first}, {"data": first})
        for second in bodies[place + 1 : place + 4]:
            assert not same({"data": first}, {"data": second}), (first, second)


@pytest.mark.failure_mode(42)
def test_numbers_that_a_float_takes_for_one_differ(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"data": b'{"a": 9007199254740992.5}'}, {"data": b'{"a": 9007199254740993.0}'})
    assert same({"data": b'{"a": 9007199254740992.5}'}, {"data": b'{"a":9007199254740992.50}'})
    assert same({"data": b'{"a": 1.5}'}, {"data": b'{"a": 1.50}'})


@pytest.mark.failure_mode(68)
def test_no_pass_in_python_goes_over_a_json_body(
    same: Same, serve_parsing: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a million containers, over which such a pass takes seconds."""
    serve_parsing()
    monkeypatch.setattr(fingerprint, "MAX_DEPTH", 2)  # what is written of method, route and query is no deeper
    assert same({"data": b'{"amount": {"a": [[[]]]}}'}, {"data": b'{"amount": {"a":[[[]]]}}'})


@pytest.mark.failure_mode(42)
def test_json_in_another_character_set_is_compared_by_what_drf_makes_of_it(same: Same, serve: Serve) -> None:
    @api_view(["POST"])
    @parser_classes([JSONParser])
    @idempotent("tests.latin")
    def view(request: Request) -> Response:
        answer, status = work(request)
        return Response(answer, status=status)

    serve(view)
    latin = {"content_type": "application/json; charset=latin-1"}
    assert same({"data": b'{"a": "\xe9", "b": 1}', **latin}, {"data": b'{"b": 1, "a": "\xe9"}', **latin})
    assert not same({"data": b'{"a": "\xe9"}', **latin}, {"data": b'{"a": "\xe8"}', **latin})


@pytest.mark.failure_mode(42)
def test_an_object_with_a_name_twice_is_itself_only(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert same({"data": b'{"a": 1, "a": 2}'}, {"data": b'{"a":1,"a":2}'})
    assert not same({"data": b'{"a": 1, "a": 2}'}, {"data": b'{"a": 2}'})
    assert not same({"data": b'{"a": 1, "a": 2}'}, {"data": b'{"a": 2, "a": 1}'})


@pytest.mark.scenario(16)
def test_what_is_not_json_is_compared_byte_for_byte(same: Same, serve: Serve) -> None:
    serve(idempotent("tests.bytes")(plain_answer))
    assert same({"data": b"{oops"}, {"data": b"{oops"})
    assert not same({"data": b"{oops"}, {"data": b"{oops "})
    assert not same({"data": b"\xff"}, {"data": b"\xfe"})
    text = {"content_type": "text/plain"}
    assert same({"data": b'{"a": 1}', **text}, {"data": b'{"a": 1}', **text})
    assert not same({"data": b'{"a": 1}', **text}, {"data": b'{"a":1}', **text})
    # JSON by another name is JSON.
    merge = {"content_type": "application/merge-patch+json; charset=utf-8"}
    assert same({"data": b'{"a": 1}', **merge}, {"data": b'{"a":1}', **merge})


@pytest.mark.failure_mode(46)
def test_headers_do_not_count(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert same({"headers": {"User-Agent": "a", "X-Request-Id": "1"}}, {"headers": {"User-Agent": "b"}})


@pytest.mark.scenario(18)
def test_the_operation_is_part_of_the_identity(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.one")(plain_answer), **{"two/": idempotent("tests.two")(plain_answer)})
    assert alice.post("/", key="k").content != alice.post("/two/", key="k").content
    assert alice.post("/", key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 2
    assert IdempotencyRecord.objects.count() == 2


@pytest.mark.scenario(18)
def test_no_scope_collides_with_another_by_concatenation(alice: Caller, serve: Serve) -> None:
    def protect(operation: str) -> Any:
        return idempotent(operation, account=lambda request: request.headers["X-Account"])(plain_answer)

    serve(**{"a/": protect("x"), "b/": protect("x/k"), "c/": protect("y:x")})
    scopes = [
        # account, path (and so operation), key: joined by a slash, a colon or nothing, some of them read the same
        ("1", "/a/", "k/4"),
        ("1", "/b/", "4"),
        ("1:y", "/a/", "k"),
        ("1", "/c/", "k"),
        ("1", "/a/", "k"),
        ("11", "/a/", "k"),
    ]
    for account, url, key in scopes:
        answer = alice.post(url, key=key, headers={"X-Account": account})
        assert answer.status_code == 201
        assert "Idempotency-Replayed" not in answer
    assert effects() == IdempotencyRecord.objects.count() == len(scopes)


@pytest.mark.failure_mode(45)
def test_a_record_of_an_earlier_algorithm_is_checked_with_its_own(
    alice: Caller, serve_operation: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_operation()
    first = alice.post(data={"amount": 1}, key="old")

    def v2(payload: fingerprint.Payload) -> str:
        return f"v2 {fingerprint._canonical_v1(payload)}"

    monkeypatch.setattr(fingerprint, "_ALGORITHMS", {**fingerprint._ALGORITHMS, "v2": v2})
    monkeypatch.setattr(fingerprint, "CURRENT_VERSION", "v2")
    assert alice.post(data={"amount": 1}, key="old").content == first.content
    assert problem_code(alice.post(data={"amount": 2}, key="old")) == "idempotency_key_reused"
    alice.post(data={"amount": 1}, key="new")
    assert effects() == 2
    assert IdempotencyRecord.objects.get(idempotency_key="new").request_hash.startswith("v2:")


@pytest.mark.failure_mode(45)
def test_a_record_of_an_unknown_algorithm_is_never_replayed(
    alice: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    alice.post(key="k")
    IdempotencyRecord.objects.update(request_hash="v9:" + 64 * "0")
    assert problem_code(alice.post(key="k")) == "idempotency_key_reused"
    assert effects() == 1


@pytest.mark.failure_mode(71)
def test_a_payload_that_no_parser_of_the_view_reads_is_left_to_the_handler(alice: Caller, serve: Serve) -> None:
    """It need not look at it; if it does, it answers 415 as it would unprotected."""

    @api_view(["POST"])
    @parser_classes([JSONParser])
    @idempotent("tests.unread")
    def view(request: Request) -> Response:
        if "look" in request.query_params:
            assert request.data
        return Response(*work(request))

    serve(view)
    first = alice.post(data=b"a text", key="k", content_type="text/plain")
    assert first.status_code == 201
    again = alice.post(data=b"a text", key="k", content_type="text/plain")
    assert (again.content, again["Idempotency-Replayed"]) == (first.content, "true")
    assert problem_code(alice.post(data=b"another", key="k", content_type="text/plain")) == "idempotency_key_reused"
    assert effects() == 1
    for _ in range(2):
        assert alice.post("/?look", data=b"a text", key="looks", content_type="text/plain").status_code == 415


@pytest.mark.failure_mode(71)
def test_a_payload_that_no_parser_reads_and_no_memory_holds_is_the_frameworks_415(
    alice: Caller, serve: Serve, settings: Any
) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10
    serve(api_view(["POST"])(parser_classes([JSONParser])(idempotent("tests.unread")(plain_answer))))
    assert alice.post(data=b"x" * 100, key="k", content_type="text/plain").status_code == 415
    assert effects() == 0
