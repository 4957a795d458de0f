"""Keys from other places than the header are validated in the same way. A key that is too old starts no operation."""

import functools
import hashlib
import json
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from urllib.parse import urlencode
from uuid import UUID

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import TemporaryFileUploadHandler
from django.http import HttpResponse
from django.views.decorators.csrf import csrf_exempt

from idempotency import Operation, claim, idempotent
from idempotency.exceptions import KeyInvalidError
from idempotency.http.key_sources import FromBody, FromForm, FromHeader, FromJSON
from idempotency.identity import keys
from idempotency.identity.keys import new_key
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.protocol import claim_request, waiting
from tests.http.callers import FORM, assert_refused, effects, multipart, records, reopen_claim, replayed
from tests.http.serving import after, parse_as_post
from tests.http.views import plain_answer
from tests.records import HOUR, expire

pytestmark = pytest.mark.django_db(transaction=True)


def form(**fields):
    return {"data": urlencode(fields, doseq=True).encode(), "content_type": FORM}


def body(**members):
    return {"data": json.dumps(members).encode()}


def event_id(request):
    return str(request.headers["X-Event-Id"]) if "X-Event-Id" in request.headers else None


#: Each source, the arguments of a request with a key there, and how the error for a missing key names the place.
SOURCES = {
    "header": (FromHeader("X-Event-Id"), lambda key: {"headers": {"X-Event-Id": key}}, "in the header X-Event-Id or"),
    "form": (FromForm(), lambda key: form(idempotency_key=key, amount=1), "in the form's field 'idempotency_key' or"),
    "multipart": (
        FromForm("token"),
        lambda key: multipart({"token": key, "file": SimpleUploadedFile("a", b"1")}),
        "in the form's field 'token' or",
    ),
    "json": (FromJSON("id"), lambda key: body(id=key, amount=1), "in the body's member 'id' or"),
    "json of json": (FromJSON("event.id"), lambda key: body(event={"id": key}), "in the body's member 'event.id' or"),
    "item of a list": (
        FromJSON("events", 1, "id"),
        lambda key: body(events=[{"id": "other"}, {"id": key}]),
        "in the body's member 'events.1.id' or",
    ),
    "function": (event_id, lambda key: {"headers": {"X-Event-Id": key}}, "in the place that it declares or"),
}
each_source = pytest.mark.parametrize(("source", "sent", "place"), SOURCES.values(), ids=SOURCES)


@each_source
def test_a_key_from_the_declared_source_is_a_key(alice, framework, source, sent, place):
    framework.serve(key=source)
    first, replay = replayed(alice, key=None, **sent("order-71"))
    assert (first.status_code, first["Idempotency-Key"], replay["Idempotency-Key"]) == (201, "order-71", "order-71")
    assert IdempotencyRecord.objects.get().idempotency_key == "order-71"
    # The header may repeat the key, in either spelling, or be the only place.
    assert alice.post(key='"order-71"', **sent("order-71")).status_code == 201
    assert effects() == 1
    assert_refused(alice, "idempotency_key_invalid", key="order-72", **sent("order-71"))
    refused = assert_refused(alice, "idempotency_key_missing", data={"amount": 1})
    assert place in json.loads(refused.content)["detail"]
    replayed(alice, key="alone", data={"amount": 1})


@each_source
def test_a_key_from_another_source_is_validated_like_the_header(alice, framework, source, sent, place):
    framework.serve(key=source)
    for key in ("", "x" * 256, "a b", "é"):
        assert_refused(alice, "idempotency_key_invalid", **sent(key))


INVALID = [
    (FromForm(), form(idempotency_key=["a", "b"]), "idempotency_key_invalid"),
    (FromForm("f"), multipart({"f": SimpleUploadedFile("a", b"k")}), "idempotency_key_invalid"),
    (FromForm(), {**form(idempotency_key="k"), "method": "PATCH"}, "idempotency_key_missing"),
    (FromForm(), body(idempotency_key="k"), "idempotency_key_missing"),
    (FromJSON("id"), body(id=7.5), "idempotency_key_invalid"),
    (FromJSON("id"), body(id=True), "idempotency_key_invalid"),
    (FromJSON("id"), body(id=["k"]), "idempotency_key_invalid"),
    (FromJSON("id"), body(id=10**255), "idempotency_key_invalid"),
    (FromJSON("id"), {"data": b'{"id": ' + b"1" * 5000 + b"}"}, "idempotency_key_missing"),
    (FromJSON("ids", 0), body(ids=[]), "idempotency_key_missing"),
    (FromJSON("ids", 0), body(ids={"0": "k"}), "idempotency_key_missing"),
    (FromJSON("ids", 0), body(ids="k"), "idempotency_key_missing"),
    (FromJSON("ids.0"), body(ids=["k"]), "idempotency_key_missing"),
    (FromBody(), {"data": b""}, "idempotency_key_missing"),
    (FromBody(), multipart({"a": "b"}), "idempotency_key_missing"),
    (FromJSON("id"), body(id=None), "idempotency_key_missing"),
    (FromJSON("id.of"), body(id="k"), "idempotency_key_missing"),
    (FromJSON("id"), {"data": b"{"}, "idempotency_key_missing"),
    (FromJSON("id"), multipart({"a": "b"}), "idempotency_key_missing"),
    (FromJSON("id"), {"data": b"[" * 100_000}, "idempotency_key_missing"),
]


def test_an_invalid_key_is_refused(alice, framework):
    for number, (source, sent, code) in enumerate(INVALID):
        framework.serve(key=source, operation=f"tests.invalid_{number}")
        assert_refused(alice, code, **sent)


def test_a_number_in_a_body_is_a_key(alice, framework):
    framework.serve(key=FromJSON("update_id"))
    first, _ = replayed(alice, key=None, **body(update_id=2**60))
    assert first["Idempotency-Key"] == str(2**60)
    assert alice.post(**body(update_id=2**60 + 1)).status_code == 201
    assert effects() == 2


@pytest.mark.parametrize("sent", [{"data": b'{"id":  1}'}, form(id="tr_1")], ids=["json", "form"])
def test_the_bytes_of_a_body_are_a_key(alice, framework, sent):
    framework.serve(key=FromBody())
    first, _ = replayed(alice, key=None, **sent)
    assert first["Idempotency-Key"] == hashlib.sha256(sent["data"]).hexdigest()
    assert alice.post(**{**sent, "data": sent["data"] + b" "}).status_code == 201
    assert effects() == 2


@pytest.mark.parametrize("path", [(), ("",), ("a.",), (-1,), ("a", True), ("a", 1.0), (None,)])
def test_an_invalid_path_in_the_body_is_refused(path):
    with pytest.raises(ValueError, match="takes the names of members and the positions of items"):
        FromJSON(*path)


@pytest.mark.parametrize("sent", [form(token="k"), multipart({"token": "k"})], ids=["form", "multipart"])
def test_the_key_is_read_from_a_form_that_a_middleware_parsed(alice, serve, sent):
    serve(after(parse_as_post, idempotent("tests.parsed", key=FromForm("token"))(plain_answer)))
    replayed(alice, method="PATCH", key=None, **sent)


@pytest.mark.parametrize("charset", ["windows-1252", "utf-16", "rot13"])
@pytest.mark.parametrize("required", [False, True])
def test_the_key_is_read_from_a_form_that_django_cannot_decode(alice, serve, charset, required):
    """PayPal's notifications are in windows-1252. Django's form parser refuses them, so a handler reads the body."""

    @serve
    @idempotent("tests.charset", key=FromForm("txn_id"), key_required=required)
    def view(request):
        assert request.body.startswith(b"name=Jos%E9")
        return plain_answer(request)

    sent = {"data": b"name=Jos%E9&txn_id=k1", "content_type": f"{FORM}; charset={charset}"}
    first, replay = alice.post(**sent), alice.post(**sent)
    assert (first.status_code, replay["Idempotency-Replayed"], replay["Idempotency-Key"]) == (201, "true", "k1")
    assert effects() == 1


def test_a_key_is_echoed_in_the_syntax_of_a_header(alice, framework):
    framework.serve(key=FromJSON("id"))
    sent = body(id='a,"b\\;c')
    echoed = alice.post(**sent)["Idempotency-Key"]
    assert echoed == '"a,\\"b\\\\;c"'
    assert alice.post(key=echoed, **sent)["Idempotency-Replayed"] == "true"


def test_a_handler_still_chooses_its_upload_handlers(alice, serve):
    @csrf_exempt
    @idempotent("tests.upload", key=FromForm("token"))
    def view(request):
        request.upload_handlers = [TemporaryFileUploadHandler(request)]
        length = len(request.FILES["file"].read())
        plain_answer(request)
        return HttpResponse(str(length), status=201)

    serve(view)
    first, _ = replayed(alice, key=None, **multipart({"token": "k", "file": SimpleUploadedFile("a", b"1" * 3_000_000)}))
    assert first.content == b"3000000"


@pytest.mark.usefixtures("atomic")
def test_a_source_may_be_the_default_of_all_operations(alice, framework, settings):
    settings.IDEMPOTENCY = {"KEY": f"{__name__}.event_id", "KEY_REQUIRED": False}
    framework.serve()
    replayed(alice, key=None, headers={"X-Event-Id": "k"})
    assert [alice.post().status_code for _ in range(2)] == [201, 201]  # requests without a key run unprotected
    assert effects() == 3


def test_a_form_parsed_before_the_view_has_no_key_in_json(alice, serve):
    """The CSRF check reads a form before the view, and its body can't be read again."""
    serve(after(lambda request: request.POST, idempotent("tests.parsed", key=FromJSON("id"))(plain_answer)))
    assert_refused(alice, "idempotency_key_missing", **multipart({"a": "b"}))


def test_a_key_in_another_header_gets_its_status_from_the_middleware(alice, serve, middleware):
    def throttled(view):
        return functools.wraps(view)(lambda request: HttpResponse(status=429) if view else None)

    protected = idempotent("tests.event", key=FromHeader("X-Event-Id"))(plain_answer)
    serve(throttled(protected), **{"other/": plain_answer, "open/": protected})
    event = {"X-Event-Id": "e1"}
    assert "Idempotency-Status" in alice.post(headers=event)
    assert "Idempotency-Status" not in alice.post()
    assert "Idempotency-Status" not in alice.post("/other/", headers=event)
    assert alice.post("/other/", headers=event, key="k")["Idempotency-Status"] == "ignored"
    assert alice.post("/open/", headers=event)["Idempotency-Status"] == "executed"


DAY = timedelta(days=1)
LATE = {"max_key_age": DAY}


class Clock:
    now = 1_800_000_000.0

    def advance(self, duration):
        self.now += duration.total_seconds()

    def key_of(self, ahead):
        """A key from a client whose clock is ahead."""
        self.advance(ahead)
        key = new_key()
        self.advance(-ahead)
        return key


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(keys, "time", SimpleNamespace(time_ns=lambda: int(clock.now * 1e9)))
    monkeypatch.setattr(claim_request, "time", SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_key_that_is_too_old_or_from_the_future_starts_nothing(alice, framework, clock):
    """A key from the future would still be accepted after its record is purged."""
    framework.serve(**LATE)
    key = new_key()
    clock.advance(DAY)
    replayed(alice, key=key)  # exactly the maximum age
    late = new_key()
    clock.advance(DAY + timedelta(seconds=1))
    refused = assert_refused(alice, "idempotency_key_expired", key=late)
    assert "Retry-After" not in refused
    assert refused["Idempotency-Key"] == late
    replayed(alice, key=clock.key_of(timedelta(minutes=5)))
    assert_refused(alice, "idempotency_key_invalid", key=clock.key_of(timedelta(minutes=5, seconds=1)))


def test_an_outcome_recorded_under_an_old_key_is_replayed(alice, framework, clock):
    framework.serve(**LATE)
    key = new_key()
    first = alice.post(key=key)
    clock.advance(2 * DAY)
    replay = alice.post(key=key)
    assert (replay.content, replay["Idempotency-Replayed"]) == (first.content, "true")
    assert_refused(alice, "idempotency_key_reused", key=key, data={"amount": 2})
    reopen_claim()
    assert_refused(alice, "idempotency_in_progress", key=key)
    IdempotencyRecord.objects.update(status=Status.RECOVERABLE, lease_expires_at=None)
    assert alice.post(key=key).status_code == 201  # continues the same operation
    expire(IdempotencyRecord.objects.get().pk)
    assert_refused(alice, "idempotency_key_expired", key=key)
    assert (effects(), records()) == (2, [("completed", 2)])
    IdempotencyRecord.objects.all().delete()
    assert_refused(alice, "idempotency_key_expired", key=key)


def test_a_key_without_a_timestamp_starts_nothing_under_max_key_age(alice, framework, settings):
    framework.serve()
    replayed(alice, key="order-71")
    settings.IDEMPOTENCY = {"MAX_KEY_AGE": DAY}
    assert alice.post(key="order-71").status_code == 201  # recorded before
    assert_refused(alice, "idempotency_key_invalid", key="order-72")
    replayed(alice, key=new_key())


SENT = Scope("1", "orders.create", "order-71")
RANDOM = UUID("18817113-3f18-4cae-8b73-d79cc9739af9")


@pytest.mark.parametrize(
    ("key", "starts"),
    [
        (str(SENT.derive_key("ship")), True),
        (str(SENT.derive_key("ship")).upper(), True),
        (SENT.key_for(SENT.derive_key("ship")), True),  # a message's key
        (str(RANDOM), False),
        (SENT.key_for(RANDOM), False),
        (SENT.derive_text("ship"), False),
        (f"{SENT.derive_key('ship')}-1", False),
    ],
)
def test_a_derived_key_without_a_timestamp_may_start(key, starts):
    """Each attempt of the sending operation sends the same key."""
    with (
        nullcontext() if starts else pytest.raises(KeyInvalidError),
        claim("late.derived", account_id="1", key=key, max_key_age=DAY) as run,
    ):
        run.result = None
    assert len(records()) == starts


def test_a_key_is_not_accepted_for_longer_than_its_record_is_kept(settings):
    Operation.declare("late.fits", max_key_age=DAY, retention=DAY + timedelta(minutes=5))
    too_long = DAY - timedelta(minutes=4)
    with pytest.raises(ImproperlyConfigured, match=r"gone could run again.*E014"):
        Operation.declare("late.wrong", max_key_age=too_long, retention=DAY)
    operation = Operation.declare("late.wrong_by_the_setting", retention=DAY)
    settings.IDEMPOTENCY = {"MAX_KEY_AGE": too_long}
    assert [mistake.id for mistake in operation.mistakes()] == ["idempotency.E014"]


def test_every_answer_has_the_retention_header(alice, framework):
    framework.serve(retention=HOUR + timedelta(seconds=1.5))
    answers = [
        *replayed(alice),
        assert_refused(alice, "idempotency_key_reused", key="k", data={"amount": 2}),
        assert_refused(alice, "idempotency_payload_invalid", key="n", data=b'{"a": NaN}'),
    ]
    assert [answer["Idempotency-Retention"] for answer in answers] == ["3601"] * 4
    assert "Idempotency-Retention" not in assert_refused(alice, "idempotency_key_missing")
    assert "Idempotency-Retention" not in dict(IdempotencyRecord.objects.get().response_headers or [])
