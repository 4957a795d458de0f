"""No input causes a server error in a protected view that its unprotected twin doesn't have. Failure modes 40 and 42.

``--count`` is the number of inputs for each handler.
"""

import cProfile
import json
from collections import Counter
from datetime import timedelta
from decimal import Decimal
from typing import Any
from unittest import mock

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import override_settings
from django.urls import path
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from idempotency import ACCEPTED, PARK, Wait, idempotent
from idempotency.conf import mistakes_in_settings
from idempotency.conf import settings as settings_in_force
from idempotency.http import exchange
from idempotency.models import IdempotencyRecord
from idempotency.options.table import SETTINGS
from idempotency.options.validators import positive_duration
from idempotency.options.values import ACP, IETF, STRIPE
from testproject.authentication import TokenAuthentication
from tests.concurrency.failures import just_before
from tests.http.callers import FORM, effects
from tests.http.serving import Framework
from tests.http.views import work
from tests.results import recording

ninja = pytest.importorskip("ninja", reason="Django Ninja is not installed")

# The input reaches the database only as a checked key, a fingerprint, and the text of an outcome. ``test_responses``
# stores every byte of such a text on each database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

fuzz = hypothesis_settings(
    max_examples=40,  # of each handler
    deadline=None,  # the database sets the pace
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
    report_multiple_bugs=False,
)

# A WSGI server puts bytes into the environment, decoded as latin-1.
raw_text = st.binary(max_size=300).map(lambda value: value.decode("latin-1"))
keys = st.one_of(
    # The payload is read only if the key is valid, so half of the keys are.
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
# allow_nan writes NaN and Infinity, which clients send although JSON lacks them; "\ud800" is written as an escape.
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
#: Calls are counted for inputs with a part of more than ``LONG`` characters, and for one in ``EACH`` responses.
LONG, EACH = 100, 20
methods = st.sampled_from(["POST"] * 4 + ["PATCH", "PUT", "DELETE", "GET", "HEAD", "OPTIONS", "QUERY", "x"])


def framed(length):
    return {"CONTENT_LENGTH": str(length)}


#: The headers for a body of this length and its coding, some of them wrong.
framings = st.sampled_from(
    [
        *[framed] * 4,
        lambda length: {"CONTENT_LENGTH": str(length // 2)},
        lambda length: {"CONTENT_LENGTH": "many"},
        lambda length: {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked"},
        lambda length: {"CONTENT_LENGTH": str(length), "HTTP_CONTENT_ENCODING": "gzip"},
    ]
)
queries = st.one_of(st.just(""), st.sampled_from(["a=1&a=2", "%ff", "=&&", "a=%00", "a" * 9_000]), raw_text)


def plain_handler(request):
    """A careful plain view: it parses the body as JSON and reads the form."""
    try:
        parsed, refused = json.loads(request.body), False
    except (ValueError, RecursionError):
        parsed, refused = None, True
    form = len(request.POST) + len(request.FILES)
    if refused:
        return HttpResponse(status=400)
    answer, status = work(request)
    return {**answer, "form": form, "parsed": parsed}, status


def body_handler(request):
    answer, status = work(request)
    return {**answer, "length": len(request.body)}, status


def drf_handler(request):
    answer, status = work(request)
    return {**answer, "parsed": str(request.data)}, status


def ninja_handler(request, payload=None):
    return {**work(request)[0], "payload": payload}


def authenticate(request):
    """Ninja's authentication by our callers' tokens."""
    request.user, _ = TokenAuthentication().authenticate(request) or (None, None)
    return request.user


def serve_by_ninja(settings):
    api = ninja.NinjaAPI(auth=authenticate, urls_namespace="fuzz")
    api.post("/", response={201: dict[str, Any]})(idempotent("tests.fuzzed")(ninja_handler))
    api.post("/twin/", response={201: dict[str, Any]})(ninja_handler)
    settings.ROOT_URLCONF = (path("", api.urls),)


@pytest.mark.failure_40
@pytest.mark.failure_42
@pytest.mark.parametrize("handler", [plain_handler, body_handler, drf_handler, ninja_handler])
def test_no_input_gives_a_server_error_that_the_twin_does_not_give(alice, serve, settings, handler, count, seed):
    if handler is ninja_handler:
        serve_by_ninja(settings)
    else:
        Framework("drf" if handler is drf_handler else "plain", serve).serve_twins(handler)
    with recording("fuzz", handler=handler.__name__, seed=seed) as figures:
        answered = compare_twins(alice, count)
        figures |= {"inputs": answered.total() // 2, "answers": dict(answered)}
    assert {201, 400} <= answered.keys()  # requests reached the handler, and some were refused


def counted(act, *arguments, **sent):
    """The response, and the number of function calls: a measure of processor time without noise."""
    profile = cProfile.Profile()
    answer = profile.runcall(act, *arguments, **sent)
    return answer, sum(function.callcount for function in profile.getstats())


def uncounted(act, *arguments, **sent):
    return act(*arguments, **sent), 0


def raise_for_some_keys(meta):
    meta.get("HTTP_IDEMPOTENCY_KEY", "").encode("ascii")


def call_a_function_for_each_byte(meta):
    sum([abs(byte) for byte in meta["QUERY_STRING"].encode()])


@pytest.mark.parametrize("parse", [raise_for_some_keys, call_a_function_for_each_byte])
def test_the_fuzz_finds_a_parser_that_raises_or_costs_more_than_the_twin(alice, serve, parse):
    Framework("plain", serve).serve_twins(body_handler)
    careless = just_before(exchange, "_key_of", lambda policy, adapter: parse(adapter.http.META))
    with careless, pytest.raises(AssertionError):
        compare_twins(alice, None)


durations = st.timedeltas(min_value=timedelta(0)) | st.sampled_from(
    [timedelta.max, timedelta.min, timedelta(0), timedelta(microseconds=1)]
)
odd_values = st.one_of(
    durations,
    durations,
    json_values,
    st.binary(max_size=40),
    st.sets(st.text(max_size=5), max_size=2),
    # No value names an existing function, because its errors would be the project's.
    st.sampled_from(["os.nothing", "os.path", ".", "..", ".a.b", "a..b", "\ud800", "*"]),
    st.sampled_from([["\ud800"], ["k" * 44], [b""], [object], object(), Decimal("NaN"), Wait(1), ACCEPTED, PARK]),
    st.sampled_from(
        [IETF, STRIPE, ACP, 1, 10**30, {"default": "default"}, {"default": "x"}, {1: 2}, [["a"]], "%s", "{}"]
    ),
)
lasting = st.sampled_from([name for name, option in SETTINGS.items() if option.problem_of is positive_duration])
entries = st.one_of(
    st.dictionaries(st.sampled_from(sorted(SETTINGS)) | st.text(max_size=9), odd_values, min_size=1, max_size=2),
    st.dictionaries(lasting, durations, min_size=1),
)


def try_settings(alice, count):
    """Either a mistake is named, or the view works."""
    became = Counter()

    @hypothesis_settings(fuzz, max_examples=count or 100)
    @example(value={})
    @example(value={"LEASE": 1})
    @example(value={"MAX_RESPONSE_BODY": 1})
    @given(value=entries | odd_values)
    def compare(value):
        with override_settings(IDEMPOTENCY=value):
            mistakes = mistakes_in_settings()
            errors = [error for error in checks.run_checks() if error.level >= checks.ERROR]
            if not mistakes:
                IdempotencyRecord.objects.all().delete()
                answers = [alice.post(key=key) for key in ("a", "b", "b")]
                # A limit smaller than the response is a valid setting, and the 500 names it.
                expected = b"response_unrecordable" if "MAX_RESPONSE_BODY" in value else b"nothing"
                works = all(answer.status_code < 500 or expected in answer.content for answer in answers)
                assert works or errors, [answer.content for answer in answers]
            else:
                assert errors
                with pytest.raises(ImproperlyConfigured):
                    settings_in_force()
            became["works" if not mistakes else "refused"] += 1

    compare()
    return became


def test_any_settings_are_refused_or_work(alice, serve, count, seed):
    Framework("plain", serve).serve_twins(body_handler)
    with recording("fuzz: settings", seed=seed) as figures:
        became = try_settings(alice, count)
        figures |= {"inputs": became.total(), "answers": dict(became)}
    assert {"works", "refused"} <= became.keys()


def compare_twins(alice, count):
    """Send inputs to both views. Returns the count of each status of the protected one."""
    answered = Counter()
    # The second request imports and connects nothing. A claim costs the same for each input.
    for key in ("a", "b"):
        assert alice.post("/no-route/").status_code == 404  # Django's page of an error imports its templates
        (_, of_twin), (_, of_first) = counted(alice.post, "/twin/"), counted(alice.post, "/", key=key)
        claim = of_first - of_twin

    @hypothesis_settings(fuzz, max_examples=count or fuzz.max_examples)
    @example(key="k", body=b"{}", content_type="", query="a" * 9_000, method="POST", framing=framed)
    @example(key="\xff", body=b"{}", content_type="application/json", query="", method="POST", framing=framed)
    @example(key="k", body=b"a=1&" * 999, content_type=FORM, query="", method="POST", framing=framed)
    @given(key=keys, body=bodies, content_type=content_types, query=queries, method=methods, framing=framings)
    def compare(key, body, content_type, query, method, framing):
        sent = {"data": body, "CONTENT_TYPE": content_type, "QUERY_STRING": query, **framing(len(body))}
        # Counting doubles the time of a request, and only a long input can be costly.
        is_long = max(map(len, (key, body, content_type, query))) > LONG
        send = counted if is_long or answered.total() % EACH == 0 else uncounted
        before = effects()
        twin, calls_of_twin = send(alice.request, method, "/twin/", **sent)
        of_twin, before = effects() - before, effects()
        IdempotencyRecord.objects.all().delete()
        tries = [send(alice.request, method, "/", HTTP_IDEMPOTENCY_KEY=key, **sent) for _ in range(2)]
        answers = [answer for answer, _ in tries]
        for answer, calls in tries:
            assert calls <= 3 * calls_of_twin + claim, (calls, calls_of_twin, claim)
            answered[answer.status_code] += 1
            if answer.status_code >= 500:
                assert twin.status_code >= 500, (twin, answer)
            if method != "POST":
                continue  # without an effect, or unprotected
            if answer.status_code == 201:
                assert of_twin == effects() - before == 1
                assert answer.content == answers[0].content
            else:
                assert (answer.status_code, effects() - before) == (answers[0].status_code, 0)

    # Querying the token costs both the same.
    with mock.patch.object(TokenAuthentication, "authenticate_credentials", lambda self, key: (alice.user, key)):
        compare()
    return answered
