"""No input gives a protected view a server error that its unprotected twin does not have. Failure modes 40 and 42."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.payloads import InvalidPayloadError, parse_json
from tests.http.callers import Caller, Serve, effects
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)

fuzz = settings(
    max_examples=250,
    deadline=None,  # the database sets the pace
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)

# What a WSGI server puts into the environment: bytes, each of them as the character of its number.
raw_text = st.binary(max_size=300).map(lambda value: value.decode("latin-1"))
keys = st.one_of(
    # Only behind a good key is there a payload to look at, so half of them are.
    *[st.just("k")] * 3,
    raw_text,
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7F), min_size=1, max_size=260),
    st.sampled_from(["k", '"k"', "a,b", "a;b", '"', "\\", "a\r\n b", "\ud800", "\U0001f511", "k" * 255, "k" * 256]),
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**40), max_value=10**40)
    | st.floats()
    | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# allow_nan writes NaN and Infinity, which clients send and JSON does not have; "\ud800" comes out as an escape.
json_bodies = json_values.map(lambda value: json.dumps(value).encode())
odd_bodies = st.sampled_from(
    [
        b"",
        b"{",
        b"[" * 10_000,
        b"[" * 300 + b"]" * 300,
        b'{"a":' * 2_000 + b"1" + b"}" * 2_000,
        b"9" * 5_000,
        b"-" + b"9" * 100_000,
        b"1e400",
        b"[1e999999999]",
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b'{"\\u0000": "\\u0000"}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b"a=1&a=2&b",
        b"%ff=%00&=&&",
        b"&".join([b"a=1"] * 1_001),
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n',
        b'--x\r\nContent-Disposition: form-data; name="f"; filename="a\x00b"\r\n\r\n1\r\n--x--\r\n',
        (
            b'--x\r\nContent-Disposition: form-data; name="f"; filename="../x"\r\nContent-Transfer-Encoding: base64'
            b"\r\n\r\n!!!\r\n--x--\r\n"
        ),
        b"--x\r\n\r\n--x",
    ]
)
bodies = st.one_of(json_bodies, odd_bodies, st.binary(max_size=200))
content_types = st.one_of(
    st.sampled_from(
        [
            "application/json",
            "application/json; charset=utf-16",
            "application/json; charset=nonsense",
            "application/vnd.api+json",
            "application/x-www-form-urlencoded",
            "application/x-www-form-urlencoded; charset=utf-16",
            "multipart/form-data; boundary=x",
            "multipart/form-data; boundary=\xff",
            "multipart/form-data",
            "multipart/form-data; boundary=" + "x" * 300,
            "text/plain",
            "",
            ";",
            "application/json, text/plain",
        ]
    ),
    raw_text,
)
queries = st.one_of(st.just(""), st.sampled_from(["a=1&a=2", "%ff", "=&&", "a=%00"]), raw_text)


def plain_handler(request: HttpRequest) -> HttpResponse:
    """What a careful plain view does: it takes the body for JSON, and looks at the form."""
    try:
        parsed = parse_json(request.body)
    except InvalidPayloadError as error:
        return error.as_response()
    form = len(request.POST) + len(request.FILES)
    answer, _ = work(request)
    return JsonResponse({**answer, "form": form, "parsed": parsed}, status=201)


def body_handler(request: HttpRequest) -> HttpResponse:
    """A plain view that has no interest in forms."""
    answer, _ = work(request)
    return JsonResponse({**answer, "length": len(request.body)}, status=201)


def drf_handler(request: Request) -> Response:
    answer, _ = work(request)
    return Response({**answer, "parsed": str(request.data)}, status=201)


def _drf(handler: Any) -> Any:
    return api_view(["POST"])(parser_classes([JSONParser, FormParser, MultiPartParser])(handler))


@pytest.fixture(params=["plain", "plain, by its body", "drf"])
def serve_twins(request: pytest.FixtureRequest, serve: Serve) -> Callable[[], None]:
    """Serve the protected view at ``/`` and its unprotected twin at ``/twin/``."""

    def serve_twins() -> None:
        if request.param == "drf":
            serve(_drf(idempotent("tests.fuzzed")(drf_handler)), **{"twin/": _drf(drf_handler)})
        else:
            handler = plain_handler if request.param == "plain" else body_handler
            serve(idempotent("tests.fuzzed")(handler), **{"twin/": handler})

    return serve_twins


@pytest.mark.failure_mode(40, 42)
def test_no_input_gives_a_server_error_that_the_twin_does_not_give(
    alice: Caller, serve_twins: Callable[[], None]
) -> None:
    serve_twins()

    @fuzz
    @given(key=keys, body=bodies, content_type=content_types, query=queries)
    def compare(key: str, body: bytes, content_type: str, query: str) -> None:
        sent = {
            "data": body,
            "content_type": "application/json",
            "CONTENT_TYPE": content_type,
            "QUERY_STRING": query,
            "CONTENT_LENGTH": str(len(body)),
        }
        before = effects()
        twin = alice.post("/twin/", **sent)
        of_twin = effects() - before
        IdempotencyRecord.objects.all().delete()
        before = effects()
        answers = [alice.post("/", HTTP_IDEMPOTENCY_KEY=key, **sent) for _ in range(2)]
        for answer in answers:
            if answer.status_code >= 500:
                assert twin.status_code >= 500, (twin, answer)
            if answer.status_code == 201:
                assert of_twin == 1
                assert effects() - before == 1
                assert answer.content == answers[0].content
            else:
                assert answer.status_code == answers[0].status_code
                assert effects() - before == 0

    compare()


@pytest.mark.failure_mode(40)
@pytest.mark.parametrize("quoted", [False, True], ids=["bare", "quoted"])
def test_every_character_in_a_key_is_taken_or_refused(
    alice: Caller, serve_operation: Callable[..., None], quoted: bool
) -> None:
    serve_operation()
    taken = set()
    for number in range(256):
        key = f"k{chr(number)}k"
        answer = alice.post(HTTP_IDEMPOTENCY_KEY=f'"{key}"' if quoted else key)
        assert answer.status_code in {201, 400}
        if answer.status_code == 201:
            taken.add(chr(number))
    # Within a string, a quote and a backslash are escaped; outside of one, three characters mean something.
    assert taken == {chr(number) for number in range(0x21, 0x7F)} - set('"\\' if quoted else '",;')
    assert effects() == len(taken)
