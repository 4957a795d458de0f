"""When two requests under one key are the same: JSON, forms, other bodies, and an operation's ``payload=``."""

import json
from itertools import pairwise

import pytest
from django.core.exceptions import BadRequest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpResponse
from django.urls import path, re_path
from rest_framework import serializers
from rest_framework.parsers import FormParser, JSONParser

from idempotency import idempotent
from idempotency.accounts import Fixed
from idempotency.keys import FromJSON
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.factories import UserFactory
from tests.http.callers import FORM, assert_refused, effects, multipart, problem_code, records, replayed
from tests.http.serving import Framework, after, drf_view, served
from tests.http.views import drf_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.scenario_16, pytest.mark.once]

AS_FORM = {"content_type": FORM}
AS_TEXT = {"content_type": "text/plain"}
LATIN = {"content_type": "application/json; charset=latin-1"}
LATIN_FORM = {"content_type": "multipart/form-data; boundary=one; charset=latin-1"}


def part(value):
    """A multipart form of one field."""
    return multipart({"a": "value"})["data"].replace(b"value", value)


@pytest.mark.failure_42
@pytest.mark.failure_44
def test_json_is_compared_by_value(same, framework):
    """``tests/unit/fingerprint`` tests which texts are equal."""
    framework.serve()
    assert same(
        b'{"to": {"bank": [1, 1e2]}, "a": 9007199254740992.5}', b'{"a":9007199254740992.50,"to":{"bank":[1.0,100]}}'
    )
    assert same('{"a": "ü"}'.encode(), b'{"a":\n\t"\\u00fc"}')
    assert same(b"1", b"1.0")
    numbers = [b'{"a": %s}' % number for number in (b"1", b'"1"', b"9007199254740993", b"9007199254740992")]
    for first, second in pairwise([*numbers, b'{"a": 1, "a": 2}', b'{"a": 2}']):
        assert not same(first, second), (first, second)


@pytest.mark.parametrize("payload", [None, lambda request: "the same"], ids=["parsed", "declared"])
def test_named_headers_count_as_a_part_of_the_payload(alice, framework, payload):
    framework.serve(payload=payload, payload_headers=("Upload-Offset", "X-Dry-Run"))

    def send(body, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return alice.post(data=body, key="k", headers=headers)["Idempotency-Status"]

    assert send({"a": 1}, Upload_Offset="0") == "executed"
    assert send({"a": 1}, Upload_Offset="0", X_Other="1") == send({"a": 1}, upload_offset="0") == "replayed"
    others = [
        {"Upload_Offset": "1"},
        {"Upload_Offset": ""},
        {},
        {"X_Dry_Run": "0"},
        {"Upload_Offset": "0", "X_Dry_Run": "1"},
    ]
    assert {send({"a": 1}, **headers) for headers in others} == {"reused"}
    assert send({"a": 2}, Upload_Offset="0") == ("reused" if payload is None else "replayed")
    assert effects() == 1


@pytest.mark.failure_42
def test_json_in_another_character_set_is_compared_as_drf_parses_it(same, serve):
    serve(drf_view(idempotent("tests.latin")(plain_answer), parsers=[JSONParser]))
    assert same(b'{"a": "\xe9", "b": 1}', b'{"b": 1, "a": "\xe9"}', **LATIN)
    assert not same(b'{"a": "\xe9"}', b'{"a": "\xe8"}', **LATIN)


@pytest.mark.failure_46
@pytest.mark.parametrize(
    ("first", "second", "options", "expected"),
    [
        (b"{oops", b"{oops", {}, True),
        (b"{oops", b"{oops ", {}, False),
        (b"\xff", b"\xfe", {}, False),
        (b'{"a": 1}', b'{"a": 1}', AS_TEXT, True),
        (b'{"a": 1}', b'{"a":1}', AS_TEXT, False),
        # curl -d sends this content type by default. As form fields, a plus sign and a space are the same.
        (b'{"a": "1+2"}', b'{"a": "1 2"}', AS_FORM, False),
        # JSON by another name is JSON.
        (b'{"a": 1}', b'{"a":1}', {"content_type": "application/merge-patch+json; charset=utf-8"}, True),
        # The fields are decoded in the form's character set, in which all bytes differ.
        (part(b"\xe8"), part(b"\xe9"), LATIN_FORM, False),
    ],
)
def test_a_body_other_than_json_is_compared_byte_for_byte(same, serve, first, second, options, expected):
    serve(idempotent("tests.bytes")(plain_answer))
    assert same(first, second, **options) == expected


@pytest.mark.failure_71
def test_a_payload_that_no_parser_reads_is_left_to_the_handler(alice, serve, settings):
    """A handler that doesn't read it runs. One that does responds with 415, as without protection."""

    def handler(request):
        if "read" in request.query_params:
            assert request.data
        return plain_answer(request)

    serve(drf_view(idempotent("tests.unread")(handler), parsers=[JSONParser]))
    replayed(alice, data=b'{"a": 1}', **AS_TEXT)
    assert_refused(alice, "idempotency_key_reused", data=b'{"a":1}', key="k", **AS_TEXT)
    for _ in range(2):
        assert alice.post("/?read", data=b"a text", key="read", **AS_TEXT).status_code == 415
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10  # now the body can't be read into memory either
    assert alice.post(data=b"x" * 100, key="large", **AS_TEXT).status_code == 415
    assert effects() == 1


def upload(name="a.txt", content=b"content"):
    return SimpleUploadedFile(name, content, content_type="text/plain")


@pytest.mark.failure_46
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_multipart_form_is_compared_by_its_parts(same, framework, method):
    framework.serve()
    first = {"method": method, **multipart({"amount": "1", "file": upload()})}
    retried = {"file": upload(), "amount": "1"}, "two"  # in another order, with a new boundary
    # Django parses the parts for POST only. A PATCH handler parses them itself, so the bytes are compared.
    assert same(first, {**first, **multipart(*retried)}) == (method == "POST" or framework.name == "drf")
    for other in (
        {"amount": "2", "file": upload()},
        {"amount": "1", "file": upload(name="b.txt")},
        {"amount": "1", "file": upload(content=b"Content")},
        {"amount": "1", "other": upload()},
        {"amount": "1", "file": ["a field of this name", upload()]},
        {"amount": "1"},
        {"amount": "1", "file": "content"},
    ):
        assert not same(first, {**first, **multipart(other)})


@pytest.mark.failure_46
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_form_is_compared_by_its_fields(same, framework, method):
    framework.serve()
    form = {"method": method, **AS_FORM}
    assert same(b"a=1&b=2&b=3", b"b=2&b=3&a=1", **form)
    for other in (b"a=1&b=3&b=2", b"a=1&b=2", b"a=2&b=2&b=3", b"a=&b=2&b=3"):
        assert not same(b"a=1&b=2&b=3", other, **form)
    assert not same(b"a=", b"", **form)
    assert not same(b"a=2&%61=1", b"%61=1&a=2", **form)  # two spellings of one name


@pytest.mark.failure_71
def test_the_csrf_token_of_a_form_is_not_compared(same, framework):
    """Django masks the token differently each time that it renders the form."""
    framework.serve()
    first = b"csrfmiddlewaretoken=one&a=1"
    assert same(first, b"a=1&csrfmiddlewaretoken=two", **AS_FORM)
    assert same(first, b"a=1", **AS_FORM)
    assert not same(first, b"csrfmiddlewaretoken=one&a=2", **AS_FORM)
    parts = multipart({"csrfmiddlewaretoken": "one", "a": "1"})
    assert same(parts, multipart({"csrfmiddlewaretoken": "two", "a": "1"}))
    assert not same(parts, multipart({"csrfmiddlewaretoken": "one", "a": "2"}))


@pytest.mark.failure_68
@pytest.mark.parametrize(
    "sent",
    [
        {"data": b"a=1" + 20 * b"&a=1"},
        {"data": 20 * b"&"},
        {"url": "?a=1" + 20 * "&a=1"},
        multipart({str(number): "1" for number in range(21)}),
    ],
    ids=["fields", "empty fields", "query", "multipart"],
)
def test_too_many_fields_are_a_400(alice, framework, settings, sent):
    def reading(request):
        _ = request.data if framework.name == "drf" else request.POST, request.GET
        return work(request)

    framework.serve_twins(reading)

    def statuses():
        urls = [f"{path}{sent.get('url', '')}" for path in ("/", "/twin/")]
        return [alice.post(**{**AS_FORM, **sent, "url": url, "key": "k"}).status_code for url in urls]

    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 20
    assert statuses() == [400, 400]
    assert not IdempotencyRecord.objects.exists()
    Transfer.objects.all().delete()
    settings.DATA_UPLOAD_MAX_NUMBER_FIELDS = 21
    assert statuses() == [201, 201]


@pytest.mark.failure_68
def test_hostile_numbers_are_refused_or_compared_as_written(alice, framework):
    framework.serve()
    for number in (b"1e999999999", b"-1e400", b"1" * 100_000, b"1" * 100_000 + b".5"):
        refused = assert_refused(alice, "idempotency_payload_invalid", data=b'{"a": %s}' % number, key="k")
        assert refused["Idempotency-Key"] == "k"
    for key, number in {"zero": b"0e999999999", "small": b"1e-999999999", "long": b"1." + b"0" * 100_000}.items():
        replayed(alice, data=b'{"a": %s}' % number, key=key)


RELEASED = {
    "json": ("/", {"data": b'{"a": 1}'}, "9c6c0ca2e634"),
    "text": ("/", {"data": b"a text", **AS_TEXT}, "3c524a88ce0b"),
    "form": ("/", {"data": b"a=1&b=2", **AS_FORM}, "ef02a25f8961"),
    "multipart": ("/", multipart({"a": "1", "file": upload()}), "f35e2a8ea19b"),
    "arguments by position": ("/7/MAX/", {}, "ef3f6bf58aa1"),
    "arguments by name": ("/orders/7/", {}, "9a975cee5e7f"),
}


@pytest.mark.failure_45
@pytest.mark.parametrize(("url", "sent", "expected"), RELEASED.values(), ids=RELEASED)
def test_fingerprints_match_the_released_version(alice, settings, url, sent, expected):
    """An upgrade may happen between a request and its retry."""
    settings.IDEMPOTENCY = {"FINGERPRINT_KEYS": ["secret"]}
    view = served(idempotent("tests.released")(lambda request, *args, **route: plain_answer(request)))
    named = path("orders/<int:pk>/", view, name="order")
    settings.ROOT_URLCONF = (path("", view), re_path("^([0-9]+)/MAX/$", view), named)
    assert alice.post(url, key="k", **sent).status_code == 201
    version, _, digest = IdempotencyRecord.objects.get().request_hash.split(":")
    assert (version, digest[:12]) == ("v1", expected)


class CommandSerializer(serializers.Serializer):
    amount = serializers.IntegerField(min_value=1)
    account = serializers.PrimaryKeyRelatedField(queryset=Transfer.objects.all(), required=False)
    note = serializers.CharField(required=False, allow_null=True)
    computed = serializers.CharField(read_only=True)

    class Line(serializers.Serializer):
        price = serializers.DecimalField(max_digits=9, decimal_places=2)

    lines = Line(many=True, required=False)
    line = Line(required=False)


def test_a_serializer_payload_has_its_declared_fields_and_types(same, serve):
    serve(drf_view(idempotent("tests.command", payload=CommandSerializer)(drf_answer)))
    first = {"amount": 1, "lines": [{"price": "1.50"}], "line": {"price": 2}, "account": 7, "note": None}
    alike = {"amount": "1", "lines": [{"price": 1.5}], "line": {"price": "2.0"}, "account": 7, "note": None}
    assert same({"data": first}, {"data": {**alike, "tracking": "not declared", "computed": "read only"}})
    lines = [[{"price": 1.6}], {"price": 1.5}]
    for other in ({"amount": 2}, {"lines": lines[0]}, {"lines": lines[1]}, {"line": 5}, {"account": 8}):
        assert not same({"data": first}, {"data": {**alike, **other}}), other
    # Payloads that the serializer would refuse are distinguished too.
    assert not same({"data": {"amount": "many"}}, {"data": {"amount": "few"}})
    assert not same({"data": {"amount": 1}}, {"data": [{"amount": 1}]})


class BoxesSerializer(serializers.Serializer):
    active = serializers.BooleanField(required=False)
    tags = serializers.MultipleChoiceField(choices=["a", "b"], required=False)


def test_a_partial_update_distinguishes_absent_from_unticked_checkboxes(same, serve):
    serve(drf_view(idempotent("tests.boxes", payload=BoxesSerializer)(drf_answer), parsers=[FormParser]))
    absent, unticked = b"other=1", b"active=false"
    assert not same(absent, unticked, method="PATCH", content_type=FORM)
    # In a complete form, an absent box is an unticked box.
    assert same(absent, unticked, content_type=FORM)


def test_a_command_may_be_any_callable(same, serve):
    serve(idempotent("tests.command", payload=lambda request: json.loads(request.body)["amount"])(plain_answer))
    assert same({"data": {"amount": 1, "sent_at": "now"}}, {"data": {"amount": 1, "sent_at": "later"}})
    assert not same({"data": {"amount": 1}}, {"data": {"amount": 2}})


@pytest.mark.failure_42
def test_a_command_that_recurses_without_end_is_refused(alice, serve):
    def recurse(request):
        return recurse(request)

    serve(idempotent("tests.command", payload=recurse)(plain_answer))
    assert_refused(alice, "idempotency_payload_invalid", key="k")


def checked_by_serializer(request):
    order = CommandSerializer(data=request.data)
    order.is_valid(raise_exception=True)
    return order.validated_data


def checked_by_hand(request):
    order = json.loads(request.body)
    if order["amount"] < 1:
        raise BadRequest("amount must be positive")
    return order


@pytest.mark.scenario_13
def test_a_payload_that_the_command_refuses_may_be_corrected(alice, framework):
    framework.serve(work, payload=checked_by_hand if framework.name == "plain" else checked_by_serializer)
    for _ in range(2):
        assert alice.post(data={"amount": -1}, key="k").status_code == 400
        assert not IdempotencyRecord.objects.exists()
    replayed(alice, data={"amount": 1})
    assert_refused(alice, "idempotency_key_reused", data={"amount": 2}, key="k")


@pytest.mark.failure_41
@pytest.mark.failure_46
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("/?dry=1", "/", False),
        ("/?a=1&b=2", "/?b=2&a=1", True),  # more spellings: ``tests/unit/fingerprint/test_payload.py``
        ({"method": "POST"}, {"method": "PATCH"}, False),
        ({"headers": {"User-Agent": "a", "X-Request-Id": "1"}}, {"headers": {"User-Agent": "b"}}, True),
    ],
)
def test_query_and_method_are_compared(same, framework, first, second, expected):
    framework.serve()
    assert same(first, second) == expected


@pytest.mark.failure_94
def test_a_given_payload_replaces_the_query(same, framework):
    framework.serve(payload=lambda request: request.headers.get("X-Event-Id", ""))
    assert same("/?signature=a", "/?signature=b")


def test_a_server_may_omit_an_empty_query(same, serve):
    view = idempotent("tests.query")(plain_answer)
    serve(lambda request: ("X-Absent" in request.headers and request.META.pop("QUERY_STRING")) or view(request))
    assert same("/", {"headers": {"X-Absent": "1"}})


def test_another_route_argument_is_another_payload(same, framework, serve):
    view = framework.view(lambda request, **route: work(request), idempotent("tests.route"))
    serve(**{"users/<int:user>/orders/<str:order>/": view})
    assert not same("/users/1/orders/2/", "/users/2/orders/1/")
    assert not same("/users/1/orders/2/", "/users/1/orders/3/")
    assert not same("/users/1/orders/11/", "/users/11/orders/1/")


def test_the_arguments_of_a_view_called_without_a_url_are_compared(rf):
    view = idempotent("tests.called", account=Fixed("a"))(lambda request, order: HttpResponse())
    answers = [view(rf.post("/", headers={"Idempotency-Key": "k"}), order=order) for order in (1, 1, 2)]
    assert [answer.status_code for answer in answers] == [200, 200, 422]


class Seat:
    """A value from a path converter whose class defines no ``__str__()``."""

    def __init__(self, number):
        self.number = number


class NamedSeat(Seat):
    def __str__(self):
        return f"seat {self.number}"


def serve_with(settings, *arguments):
    """Serve an operation at ``/0/``, ``/1/`` and so on: one place, with one of these arguments for each route."""
    view = served(idempotent("tests.route")(lambda request, *args, **route: plain_answer(request)))
    routes = [path(f"{number}/", view, {"of": each}, name="place") for number, each in enumerate(arguments)]
    settings.ROOT_URLCONF = (*routes, re_path("^by-position/([0-9]+)(/)$", view))


def test_a_route_argument_of_any_type_is_compared(same, settings):
    user = UserFactory()
    serve_with(settings, NamedSeat(1), NamedSeat(1), NamedSeat(2), user, user, UserFactory())
    for first, again, other in (("/0/", "/1/", "/2/"), ("/3/", "/4/", "/5/")):
        assert same(first, again)
        assert not same(first, other)
    assert not same("/by-position/1/", "/by-position/2/")


@pytest.mark.parametrize(("argument", "name"), [(Seat(1), "Seat"), ([Seat(1)], "list")], ids=["seat", "seats"])
def test_a_route_argument_without_a_text_is_refused(alice, settings, caplog, argument, name):
    """Its text is a memory address, so a retry would be a different request."""
    serve_with(settings, argument)
    for _ in range(2):
        assert problem_code(alice.post("/0/", key="k")) == "idempotency_payload_unreadable"
    assert f"The text of a route argument of type {name} is its address in memory" in caplog.text
    assert (effects(), records()) == (0, [])


@pytest.mark.parametrize("kind", ["plain", "drf"])
@pytest.mark.parametrize("policy", [{}, {"payload": lambda request: request.body}, {"key": FromJSON("a")}])
def test_a_body_whose_stream_is_already_read_is_refused(alice, serve, caplog, kind, policy):
    view = Framework(kind, serve).view(protect=idempotent("tests.read", **policy))
    serve(after(lambda request: request.read(), view))
    refused = alice.post(data={"a": 1}, key=None if "key" in policy else "k")
    assert problem_code(refused) == "idempotency_payload_unreadable"
    assert "Let that code use request.body, which can be read again" in caplog.text
    assert (effects(), records()) == (0, [])


def test_the_route_is_read_only_if_there_is_a_key(alice, settings, caplog):
    class Unreadable:
        def __str__(self):
            raise ValueError

    view = idempotent("tests.route", key_required=False)(lambda request, value: plain_answer(request))
    settings.ROOT_URLCONF = (path("", served(view), {"value": Unreadable()}),)
    assert alice.post().status_code == 201
    assert problem_code(alice.post(key="k")) == "idempotency_payload_unreadable"
    assert "Unreadable is compared with a retry's, and its __str__ raised ValueError." in caplog.text
    assert effects() == 1
