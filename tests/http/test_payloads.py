"""When two requests under one key are the same request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path, re_path, register_converter
from rest_framework import serializers
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import fingerprint, idempotent
from idempotency.models import IdempotencyRecord
from testproject.authentication import token_required
from testproject.models import Transfer
from tests.factories import UserFactory
from tests.http.callers import FORM, Caller, Serve, effects, multipart, problem_code
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["plain", "drf"])
def serve_parsing(request: pytest.FixtureRequest, serve: Serve) -> Callable[..., None]:
    """Serve an operation that takes JSON, forms and uploads: as a plain view, and as a DRF view."""

    @idempotent("tests.plain_payload")
    def plain(request: HttpRequest) -> HttpResponse:
        return plain_answer(request)

    @api_view(["POST", "PATCH"])
    @parser_classes([JSONParser, FormParser, MultiPartParser])
    @idempotent("tests.drf_payload")
    def drf(request: Request) -> Response:
        answer, status = work(request)
        return Response(answer, status=status)

    return lambda: serve(plain if request.param == "plain" else drf)


class Same:
    """Asserts what is one request and what is another one, by effects and by answers."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def __call__(self, first: dict[str, Any], second: dict[str, Any]) -> bool:
        Transfer.objects.all().delete()
        IdempotencyRecord.objects.all().delete()
        answers = [self.caller.request(**{"method": "POST", **arguments}, key="k") for arguments in (first, second)]
        assert answers[0].status_code == 201, answers[0].content
        assert effects() == 1
        if answers[1].status_code == 201:
            assert answers[1].content == answers[0].content
            assert answers[1]["Idempotency-Replayed"] == "true"
            return True
        assert problem_code(answers[1]) == "idempotency_key_reused"
        return False


@pytest.fixture
def same(alice: Caller) -> Same:
    return Same(alice)


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


@pytest.mark.scenario(16)
def test_another_query_string_is_another_payload(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"url": "/?dry=1"}, {"url": "/"})
    assert not same({"url": "/?dry=1"}, {"url": "/?dry=2"})
    assert not same({"url": "/?a=1&a=2"}, {"url": "/?a=2&a=1"})
    assert same({"url": "/?a=1&b=2"}, {"url": "/?b=2&a=1"})


@pytest.mark.scenario(16)
def test_the_order_of_one_name_counts_however_it_is_spelled(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"url": "/?a=2&%61=1"}, {"url": "/?%61=1&a=2"})
    form = {"content_type": FORM}
    assert not same({"data": b"a=2&%61=1", **form}, {"data": b"%61=1&a=2", **form})


@pytest.mark.failure_mode(41)
def test_queries_that_read_alike_when_joined_differ(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"url": "/?a=&a=b&c="}, {"url": "/?a=&b=c&b="})
    assert not same({"url": "/?a=b%26c"}, {"url": "/?a=b&c"})
    assert not same({"url": "/?a=b%3Dc"}, {"url": "/?a%3Db=c"})


@pytest.mark.scenario(16)
@pytest.mark.parametrize("framework", ["plain", "drf"])
def test_another_route_argument_is_another_payload(same: Same, settings: Any, framework: str) -> None:
    def answer(request: Any, **route: Any) -> Any:
        body, status = work(request)
        return Response(body, status=status) if framework == "drf" else JsonResponse(body, status=status)

    if framework == "drf":
        view: Any = api_view(["POST"])(idempotent("tests.route")(answer))
    else:
        view = token_required(idempotent("tests.route")(answer))
    settings.ROOT_URLCONF = (
        path("users/<int:user>/orders/<str:order>/", view),
        path("flats/<str:order>/<int:user>/", view),
    )
    assert same({"url": "/users/1/orders/2/"}, {"url": "/users/1/orders/2/"})
    assert not same({"url": "/users/1/orders/2/"}, {"url": "/users/2/orders/1/"})
    assert not same({"url": "/users/1/orders/2/"}, {"url": "/users/1/orders/3/"})
    assert not same({"url": "/users/1/orders/11/"}, {"url": "/users/11/orders/1/"})


@pytest.mark.scenario(16)
def test_positional_route_arguments_count(same: Same, settings: Any) -> None:
    view = token_required(idempotent("tests.positional")(lambda request, *args: plain_answer(request)))
    settings.ROOT_URLCONF = (re_path("^orders/([0-9]+)/([0-9]+)/$", view),)
    assert same({"url": "/orders/1/2/"}, {"url": "/orders/1/2/"})
    assert not same({"url": "/orders/1/2/"}, {"url": "/orders/2/1/"})


class UserConverter:
    regex = "[0-9]+"

    def to_python(self, value: str) -> User:
        return User.objects.get(pk=value)

    def to_url(self, value: User) -> str:
        return str(value.pk)


register_converter(UserConverter, "user_of_tests")


@pytest.mark.scenario(16)
def test_a_route_argument_of_any_type_counts(same: Same, settings: Any) -> None:
    view = token_required(idempotent("tests.converted")(lambda request, payee: plain_answer(request)))
    settings.ROOT_URLCONF = (path("pay/<user_of_tests:payee>/", view),)
    carol, dave = UserFactory(), UserFactory()
    assert same({"url": f"/pay/{carol.pk}/"}, {"url": f"/pay/{carol.pk}/"})
    assert not same({"url": f"/pay/{carol.pk}/"}, {"url": f"/pay/{dave.pk}/"})


class Seat:
    """What a converter may make of a path, without a text of its own."""

    def __init__(self, number: str) -> None:
        self.number = number


class NamedSeat(Seat):
    def __str__(self) -> str:
        return f"seat {self.number}"


class SeatConverter:
    regex = "[0-9]+"

    def to_python(self, value: str) -> Seat:
        return Seat(value)

    def to_url(self, value: Seat) -> str:
        return value.number


class NamedSeatConverter(SeatConverter):
    def to_python(self, value: str) -> Seat:
        return NamedSeat(value)


class SeatsConverter(SeatConverter):
    def to_python(self, value: str) -> Any:
        return [Seat(value)]


for _name, _converter in {"seat": SeatConverter, "named_seat": NamedSeatConverter, "seats": SeatsConverter}.items():
    register_converter(_converter, f"{_name}_of_tests")


@pytest.mark.scenario(16)
@pytest.mark.parametrize("kind", ["seat", "seats"])
def test_a_route_argument_without_a_text_of_its_own_is_refused_with_the_remedy(
    alice: Caller, settings: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Its text is an address in memory, by which an honest retry would be another request."""
    view = token_required(idempotent("tests.seats")(lambda request, seat: plain_answer(request)))
    settings.ROOT_URLCONF = (path(f"book/<{kind}_of_tests:seat>/", view),)
    for _ in range(2):
        assert alice.post("/book/1/", key="k").status_code == 500
    assert "Give the type a __str__" in caplog.text
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.scenario(16)
def test_a_route_argument_counts_by_its_own_text(same: Same, settings: Any) -> None:
    view = token_required(idempotent("tests.named_seats")(lambda request, seat: plain_answer(request)))
    settings.ROOT_URLCONF = (path("book/<named_seat_of_tests:seat>/", view),)
    assert same({"url": "/book/1/"}, {"url": "/book/1/"})
    assert not same({"url": "/book/1/"}, {"url": "/book/2/"})


@pytest.mark.failure_mode(46)
def test_another_method_is_another_payload(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert not same({"method": "POST"}, {"method": "PATCH"})


@pytest.mark.failure_mode(46)
def test_headers_do_not_count(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    assert same({"headers": {"User-Agent": "a", "X-Request-Id": "1"}}, {"headers": {"User-Agent": "b"}})


@pytest.mark.scenario(16)
def test_a_multipart_retry_with_a_new_boundary_replays(same: Same, serve_parsing: Callable[[], None]) -> None:
    def upload(name: str = "a.txt", content: bytes = b"content", kind: str = "text/plain") -> SimpleUploadedFile:
        return SimpleUploadedFile(name, content, content_type=kind)

    serve_parsing()
    first = multipart({"amount": "1", "file": upload()}, "one")
    assert same(first, multipart({"file": upload(), "amount": "1"}, "two"))
    assert not same(first, multipart({"amount": "2", "file": upload()}, "one"))
    assert not same(first, multipart({"amount": "1", "file": upload(name="b.txt")}, "one"))
    assert not same(first, multipart({"amount": "1", "file": upload(content=b"Content")}, "one"))
    assert not same(first, multipart({"amount": "1", "other": upload()}, "one"))
    assert not same(first, multipart({"amount": "1"}, "one"))
    assert not same(first, multipart({"amount": "1", "file": "content"}, "one"))


@pytest.mark.scenario(16)
def test_forms_are_compared_by_their_fields(same: Same, serve_parsing: Callable[[], None]) -> None:
    serve_parsing()
    first = {"data": b"a=1&b=2&b=3", "content_type": FORM}
    assert same(first, {"data": b"b=2&b=3&a=1", "content_type": FORM})
    assert not same(first, {"data": b"a=1&b=3&b=2", "content_type": FORM})
    assert not same(first, {"data": b"a=1&b=2", "content_type": FORM})
    assert not same({"data": b"a=", "content_type": FORM}, {"data": b"", "content_type": FORM})


@pytest.mark.failure_mode(71)
def test_the_csrf_token_of_a_form_does_not_count(same: Same, serve_parsing: Callable[[], None]) -> None:
    """It is masked anew each time that the form is shown."""
    serve_parsing()
    form = {"content_type": FORM}
    first = {"data": b"csrfmiddlewaretoken=one&a=1", **form}
    assert same(first, {"data": b"a=1&csrfmiddlewaretoken=two", **form})
    assert same(first, {"data": b"a=1", **form})
    assert not same(first, {"data": b"csrfmiddlewaretoken=one&a=2", **form})
    parts = multipart({"csrfmiddlewaretoken": "one", "a": "1"}, "one")
    assert same(parts, multipart({"csrfmiddlewaretoken": "two", "a": "1"}, "two"))
    assert not same(parts, multipart({"csrfmiddlewaretoken": "one", "a": "2"}, "one"))


@pytest.mark.failure_mode(68)
@pytest.mark.parametrize("framework", ["plain", "drf"])
@pytest.mark.parametrize(
    "sent", [{"data": b"a=1" + 20 * b"&a=1"}, {"data": 20 * b"&"}, {"url": "?a=1" + 20 * "&a=1"}], ids=str
)
def test_a_form_with_more_fields_than_django_allows_is_djangos_400_and_claims_nothing(
    alice: Caller, serve: Serve, settings: Any, framework: str, sent: dict[str, Any]
) -> None:
    def reading(request: Any) -> Any:
        if framework == "drf":
            answer, status = work(request)
            return Response({**answer, "read": len(request.data) + len(request.GET)}, status=status)
        _ = request.POST, request.GET
        return plain_answer(request)

    def decorated(view: Any) -> Any:
        return api_view(["POST"])(parser_classes([FormParser])(view)) if framework == "drf" else view

    serve(decorated(idempotent("tests.fields")(reading)), **{"twin/": decorated(reading)})

    def status_at(path: str) -> int:
        arguments = {"content_type": FORM, **sent, "url": path + sent.get("url", ""), "key": "k"}
        status: int = alice.post(**arguments).status_code
        return status

    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 20
    assert status_at("/") == status_at("/twin/") == 400
    assert not IdempotencyRecord.objects.exists()
    Transfer.objects.all().delete()
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 21
    assert status_at("/") == status_at("/twin/") == 201


@pytest.mark.failure_mode(46)
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_form_is_compared_whatever_the_method(same: Same, serve_parsing: Callable[[], None], method: str) -> None:
    """Django parses a form for POST only; a handler of PATCH parses it itself."""
    serve_parsing()
    form = {"method": method, "content_type": FORM}
    assert same({"data": b"a=1", **form}, {"data": b"a=1", **form})
    assert not same({"data": b"a=1", **form}, {"data": b"a=2", **form})
    first, other = multipart({"a": "1"}, "one"), multipart({"a": "2"}, "one")
    assert same({"method": method, **first}, {"method": method, **first})
    assert not same({"method": method, **first}, {"method": method, **other})


@pytest.mark.failure_mode(46)
def test_json_that_is_sent_as_a_form_is_compared_as_the_handler_reads_it(same: Same, serve: Serve) -> None:
    """What curl -d sends unless told otherwise. As form fields, a plus sign and a space are the same."""
    serve(idempotent("tests.curl")(plain_answer))
    assert same({"data": b'{"a": "1+2"}', "content_type": FORM}, {"data": b'{"a": "1+2"}', "content_type": FORM})
    assert not same({"data": b'{"a": "1+2"}', "content_type": FORM}, {"data": b'{"a": "1 2"}', "content_type": FORM})


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


# The operation's own command


class CommandSerializer(serializers.Serializer[Any]):
    amount = serializers.IntegerField()
    account = serializers.PrimaryKeyRelatedField(queryset=Transfer.objects.all(), required=False)
    note = serializers.CharField(required=False, allow_null=True)
    computed = serializers.CharField(read_only=True)

    class Line(serializers.Serializer[Any]):
        price = serializers.DecimalField(max_digits=9, decimal_places=2)

    lines = Line(many=True, required=False)
    line = Line(required=False)


def serve_command(serve: Serve, command: Any) -> None:
    @api_view(["POST"])
    @idempotent("tests.command", command=command)
    def view(request: Request) -> Response:
        answer, status = work(request)
        return Response(answer, status=status)

    serve(view)


@pytest.mark.scenario(16)
def test_a_command_of_a_serializer_reads_what_it_declares_in_its_own_types(
    same: Same, serve: Serve, django_assert_num_queries: Any
) -> None:
    serve_command(serve, CommandSerializer)
    first = {"data": {"amount": 1, "lines": [{"price": "1.50"}], "line": {"price": 2}, "account": 7, "note": None}}
    alike = {"amount": "1", "lines": [{"price": 1.5}], "line": {"price": "2.0"}, "account": 7, "note": None}
    assert same(first, {"data": {**alike, "tracking": "not declared", "computed": "read only"}})
    assert not same(first, {"data": {**alike, "amount": 2}})
    assert not same(first, {"data": {**alike, "lines": [{"price": 1.6}]}})
    assert not same(first, {"data": {**alike, "lines": {"price": 1.5}}})
    assert not same(first, {"data": {**alike, "line": 5}})
    assert not same(first, {"data": {**alike, "account": 8}})
    assert not same({"data": {"amount": "many"}}, {"data": {"amount": "few"}})
    assert not same({"data": {"amount": 1}}, {"data": [{"amount": 1}]})


class BoxesSerializer(serializers.Serializer[Any]):
    active = serializers.BooleanField(required=False)
    tags = serializers.MultipleChoiceField(choices=["a", "b"], required=False)


@pytest.mark.scenario(16)
def test_a_partial_update_tells_a_box_that_is_left_out_from_one_that_is_not_ticked(same: Same, serve: Serve) -> None:
    @api_view(["POST", "PATCH"])
    @parser_classes([FormParser])
    @idempotent("tests.boxes", command=BoxesSerializer)
    def view(request: Request) -> Response:
        answer, status = work(request)
        return Response(answer, status=status)

    serve(view)
    absent, unticked = {"data": b"other=1", "content_type": FORM}, {"data": b"active=false", "content_type": FORM}
    assert not same({"method": "PATCH", **absent}, {"method": "PATCH", **unticked})
    assert same({"method": "PATCH", **unticked}, {"method": "PATCH", **unticked})
    # A form that is sent whole leaves a box out to say that it isn't ticked.
    assert same(absent, unticked)


@pytest.mark.scenario(16)
def test_a_command_may_be_any_callable(same: Same, serve: Serve) -> None:
    serve(idempotent("tests.command", command=lambda request: json.loads(request.body)["amount"])(plain_answer))
    assert same({"data": {"amount": 1, "sent_at": "now"}}, {"data": {"amount": 1, "sent_at": "later"}})
    assert not same({"data": {"amount": 1}}, {"data": {"amount": 2}})


def test_a_command_that_can_not_be_fingerprinted_is_a_mistake_of_the_project(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.command", command=lambda request: object())(plain_answer))
    assert alice.post(key="k").status_code == 500
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.failure_mode(42)
def test_a_command_that_recurses_without_end_is_refused(alice: Caller, serve: Serve) -> None:
    def recurse(request: HttpRequest) -> object:
        return recurse(request)

    serve(idempotent("tests.command", command=recurse)(plain_answer))
    assert problem_code(alice.post(key="k")) == "idempotency_payload_invalid"
    assert effects() == 0


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
