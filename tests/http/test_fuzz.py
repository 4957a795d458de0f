"""No input gives a protected view a server error that its unprotected twin does not have. Failure modes 40 and 42.

``--count`` is how many inputs each handler gets.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.urls import path
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from idempotency import idempotent
from idempotency.http import exchange
from idempotency.models import IdempotencyRecord
from testproject.authentication import TokenAuthentication
from tests.http.callers import Caller, effects
from tests.http.serving import Framework, Serve
from tests.http.views import work
from tests.results import note

ninja = pytest.importorskip("ninja", reason="Django Ninja is not installed")

# What of the input reaches the database is a checked key, a fingerprint, and the text of an outcome, whose every byte
# ``test_responses`` has on each database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

fuzz = hypothesis_settings(
    max_examples=75,  # of each handler, and others in each run
    deadline=None,  # the database sets the pace
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
    report_multiple_bugs=False,
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
        *[b"", b"{", b"[" * 10_000, b"[" * 300 + b"]" * 300, b'{"a":' * 2_000 + b"1" + b"}" * 2_000],
        *[b"9" * 5_000, b"-" + b"9" * 100_000, b"1e400", b"[1e999999999]", b'{"a": 1, "a": 2}'],
        *[b'"\\ud800"', b'{"\\u0000": "\\u0000"}', b"\xef\xbb\xbf{}", "{}".encode("utf-16")],
        *[b"a=1&a=2&b", b"%ff=%00&=&&", b"&".join([b"a=1"] * 1_001), b"--x\r\n\r\n--x"],
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n',
        b'--x\r\nContent-Disposition: form-data; name="f"; filename="a\x00b"\r\n\r\n1\r\n--x--\r\n',
        (
            b'--x\r\nContent-Disposition: form-data; name="f"; filename="../x"\r\n'
            b"Content-Transfer-Encoding: base64\r\n\r\n!!!\r\n--x--\r\n"
        ),
    ]
)
bodies = st.one_of(json_bodies, odd_bodies, st.binary(max_size=200))
content_types = st.one_of(
    st.sampled_from(
        [
            *["application/json", "application/json; charset=utf-16", "application/json; charset=nonsense"],
            *["application/vnd.api+json", "application/json, text/plain", "text/plain", "", ";"],
            *["application/x-www-form-urlencoded", "application/x-www-form-urlencoded; charset=utf-16"],
            *["multipart/form-data; boundary=x", "multipart/form-data; boundary=\xff", "multipart/form-data"],
            "multipart/form-data; boundary=" + "x" * 300,
        ]
    ),
    raw_text,
)
methods = st.sampled_from(["POST"] * 4 + ["PATCH", "PUT", "DELETE", "GET", "HEAD", "OPTIONS", "QUERY", "x"])


def framed(length: int) -> dict[str, str]:
    return {"CONTENT_LENGTH": str(length)}


#: What the head says of the body's length and coding, for a body of so many bytes.
framings = st.sampled_from(
    [
        *[framed] * 4,
        lambda length: {"CONTENT_LENGTH": str(length // 2)},
        lambda length: {"CONTENT_LENGTH": "many"},
        lambda length: {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked"},
        lambda length: {"CONTENT_LENGTH": str(length), "HTTP_CONTENT_ENCODING": "gzip"},
    ]
)
queries = st.one_of(st.just(""), st.sampled_from(["a=1&a=2", "%ff", "=&&", "a=%00"]), raw_text)


def plain_handler(request: HttpRequest) -> Any:
    """What a careful plain view does: it takes the body for JSON, and looks at the form."""
    try:
        parsed = json.loads(request.body)
    except (ValueError, RecursionError):
        return HttpResponse(status=400)
    form = len(request.POST) + len(request.FILES)
    answer, status = work(request)
    return {**answer, "form": form, "parsed": parsed}, status


def body_handler(request: HttpRequest) -> Any:
    answer, status = work(request)
    return {**answer, "length": len(request.body)}, status


def drf_handler(request: Any) -> Any:
    answer, status = work(request)
    return {**answer, "parsed": str(request.data)}, status


def ninja_handler(request: HttpRequest, payload: ninja.Body[Any] = None) -> Any:
    return {**work(request)[0], "payload": payload}


def authenticate(request: Any) -> Any:
    """Ninja's authentication by our callers' tokens."""
    request.user, _ = TokenAuthentication().authenticate(request) or (None, None)
    return request.user


def serve_by_ninja(settings: Any) -> None:
    api = ninja.NinjaAPI(auth=authenticate, urls_namespace="fuzz")
    api.post("/", response={201: dict[str, Any]})(idempotent("tests.fuzzed")(ninja_handler))
    api.post("/twin/", response={201: dict[str, Any]})(ninja_handler)
    settings.ROOT_URLCONF = (path("", api.urls),)


@pytest.mark.failure_40
@pytest.mark.failure_42
@pytest.mark.parametrize("handler", [plain_handler, body_handler, drf_handler, ninja_handler])
def test_no_input_gives_a_server_error_that_the_twin_does_not_give(
    alice: Caller, serve: Serve, settings: Any, handler: Any, count: int | None
) -> None:
    if handler is ninja_handler:
        serve_by_ninja(settings)
    else:
        Framework("drf" if handler is drf_handler else "plain", serve).serve_twins(handler)
    answered = compare_twins(alice, count)
    assert {201, 400} <= answered.keys()  # requests came through to the handler, and to the key's check
    note("fuzz", handler=handler.__name__, requests=answered.total(), answers=dict(answered), violations=0)


def test_a_parser_that_raises_is_found(alice: Caller, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    key_of = exchange._key_of

    def careless(policy: Any, adapter: Any) -> str | None:
        adapter.http.META.get("HTTP_IDEMPOTENCY_KEY", "").encode("ascii")
        return key_of(policy, adapter)

    monkeypatch.setattr(exchange, "_key_of", careless)
    Framework("plain", serve).serve_twins(body_handler)
    with pytest.raises(AssertionError):
        compare_twins(alice, None)


def compare_twins(alice: Caller, count: int | None) -> Counter[int]:
    """Send inputs to both, and return what the protected one has answered."""
    answered = Counter[int]()

    @hypothesis_settings(fuzz, max_examples=count or fuzz.max_examples)
    @example(key="\xff", body=b"{}", content_type="application/json", query="", method="POST", framing=framed)
    @given(key=keys, body=bodies, content_type=content_types, query=queries, method=methods, framing=framings)
    def compare(key: str, body: bytes, content_type: str, query: str, method: str, framing: Any) -> None:
        sent = {"data": body, "CONTENT_TYPE": content_type, "QUERY_STRING": query, **framing(len(body))}
        before = effects()
        twin = alice.request(method, "/twin/", **sent)
        of_twin = effects() - before
        IdempotencyRecord.objects.all().delete()
        before = effects()
        answers = [alice.request(method, "/", HTTP_IDEMPOTENCY_KEY=key, **sent) for _ in range(2)]
        for answer in answers:
            answered[answer.status_code] += 1
            if answer.status_code >= 500:
                assert twin.status_code >= 500, (twin, answer)
            if method != "POST":
                continue  # of no effect, or one that is not protected
            if answer.status_code == 201:
                assert of_twin == effects() - before == 1
                assert answer.content == answers[0].content
            else:
                assert (answer.status_code, effects() - before) == (answers[0].status_code, 0)

    compare()
    return answered
