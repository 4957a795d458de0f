"""A key from elsewhere than the header is the same key, validated in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import TemporaryFileUploadHandler
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.views.decorators.csrf import csrf_exempt

from idempotency import idempotent
from idempotency.http.key_sources import FromCookie, FromForm, FromHeader, FromJSON
from idempotency.models import IdempotencyRecord
from tests.http.callers import FORM, Caller, assert_refused, effects, multipart, replayed
from tests.http.serving import Framework, Serve, parse_as_post
from tests.http.views import plain_answer

pytestmark = pytest.mark.django_db(transaction=True)


def form(**fields: Any) -> dict[str, Any]:
    return {"data": urlencode(fields, doseq=True).encode(), "content_type": FORM}


def body(**members: Any) -> dict[str, Any]:
    return {"data": json.dumps(members).encode()}


#: Each source, and the arguments of a request that has a key there.
SOURCES: dict[str, tuple[Any, Callable[[str], dict[str, Any]]]] = {
    "header": (FromHeader("X-Event-Id"), lambda key: {"headers": {"X-Event-Id": key}}),
    "form": (FromForm(), lambda key: form(idempotency_key=key, amount=1)),
    "multipart": (FromForm("token"), lambda key: multipart({"token": key, "file": SimpleUploadedFile("a", b"1")})),
    "json": (FromJSON("id"), lambda key: body(id=key, amount=1)),
    "json of json": (FromJSON("event.id"), lambda key: body(event={"id": key})),
    "cookie": (FromCookie("checkout"), lambda key: {"headers": {"Cookie": f"checkout={key}"}}),
}
each_source = pytest.mark.parametrize(("source", "sent"), SOURCES.values(), ids=SOURCES)


@each_source
def test_a_key_of_the_operations_own_is_a_key(alice: Caller, framework: Framework, source: Any, sent: Any) -> None:
    framework.serve(key=source)
    first, replay = replayed(alice, key=None, **sent("order-71"))
    assert (first.status_code, first["Idempotency-Key"], replay["Idempotency-Key"]) == (201, "order-71", "order-71")
    assert IdempotencyRecord.objects.get().idempotency_key == "order-71"
    # The header may say the same, in either spelling; or say it alone.
    assert alice.post(key='"order-71"', **{**sent("order-71"), **headers_too(sent("order-71"))}).status_code == 201
    assert effects() == 1
    assert_refused(alice, "idempotency_key_invalid", key="order-72", **sent("order-71"))
    assert_refused(alice, "idempotency_key_missing", data={"amount": 1})
    replayed(alice, key="alone", data={"amount": 1})


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (FromHeader("X-Event-Id"), "in the header X-Event-Id or"),
        (FromForm(), "in the form's field 'idempotency_key' or"),
        (FromJSON("event.id"), "in the body's member 'event.id' or"),
        (FromCookie("checkout"), "in the cookie 'checkout' or"),
        (lambda request: None, "in the place that it declares or"),
    ],
)
def test_who_sends_no_key_is_told_where_the_operation_looks_for_it(
    alice: Caller, serve: Serve, source: Any, place: str
) -> None:
    serve(idempotent("tests.missing", key=source)(plain_answer))
    refused = assert_refused(alice, "idempotency_key_missing", data={"amount": 1})
    assert place in json.loads(refused.content)["detail"]


def headers_too(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"headers": arguments["headers"]} if "headers" in arguments else {}


@pytest.mark.parametrize(("source", "sent"), [SOURCES[name] for name in SOURCES if name != "cookie"])
@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "é"], ids=["empty", "long", "space", "not ASCII"])
def test_it_is_validated_as_the_header_is(
    alice: Caller, framework: Framework, source: Any, sent: Any, key: str
) -> None:
    framework.serve(key=source)
    assert_refused(alice, "idempotency_key_invalid", **sent(key))


@pytest.mark.parametrize(
    ("source", "sent", "code"),
    [
        (FromForm(), form(idempotency_key=["a", "b"]), "idempotency_key_invalid"),
        (FromForm("f"), multipart({"f": SimpleUploadedFile("a", b"k")}), "idempotency_key_invalid"),
        (FromForm(), {**form(idempotency_key="k"), "method": "PATCH"}, "idempotency_key_missing"),
        (FromForm(), body(idempotency_key="k"), "idempotency_key_missing"),
        (FromJSON("id"), body(id=7), "idempotency_key_invalid"),
        (FromJSON("id"), body(id=None), "idempotency_key_missing"),
        (FromJSON("id.of"), body(id="k"), "idempotency_key_missing"),
        (FromJSON("id"), {"data": b"{"}, "idempotency_key_missing"),
        (FromJSON("id"), multipart({"a": "b"}), "idempotency_key_missing"),
        (FromJSON("id"), {"data": b"[" * 100_000}, "idempotency_key_missing"),
    ],
)
def test_what_is_no_key_is_refused(alice: Caller, framework: Framework, source: Any, sent: Any, code: str) -> None:
    framework.serve(key=source)
    assert_refused(alice, code, **sent)


@pytest.mark.parametrize("sent", [form(token="k"), multipart({"token": "k"})], ids=["form", "multipart"])
def test_a_form_that_a_middleware_has_parsed_for_another_method_has_its_key(
    alice: Caller, serve: Serve, sent: dict[str, Any]
) -> None:
    protected = idempotent("tests.parsed", key=FromForm("token"))(plain_answer)

    def parsing(request: HttpRequest) -> Any:
        parse_as_post(request)
        return protected(request)

    serve(parsing)
    replayed(alice, method="PATCH", key=None, **sent)


def test_a_key_is_echoed_as_a_header_can_hold_it(alice: Caller, framework: Framework) -> None:
    framework.serve(key=FromJSON("id"))
    sent = body(id='a,"b\\;c')
    echoed = alice.post(**sent)["Idempotency-Key"]
    assert echoed == '"a,\\"b\\\\;c"'
    assert alice.post(key=echoed, **sent)["Idempotency-Replayed"] == "true"


def test_a_handler_still_chooses_its_upload_handlers(alice: Caller, serve: Serve) -> None:
    @csrf_exempt
    @idempotent("tests.upload", key=FromForm("token"))
    def view(request: HttpRequest) -> HttpResponse:
        request.upload_handlers = [TemporaryFileUploadHandler(request)]
        length = len(request.FILES["file"].read())
        plain_answer(request)
        return HttpResponse(str(length), status=201)

    serve(view)
    first, _ = replayed(alice, key=None, **multipart({"token": "k", "file": SimpleUploadedFile("a", b"1" * 3_000_000)}))
    assert first.content == b"3000000"


def event_id(request: Any) -> str | None:
    return str(request.headers["X-Event-Id"]) if "X-Event-Id" in request.headers else None


@pytest.mark.usefixtures("atomic")
def test_a_source_may_be_the_default_of_all(alice: Caller, framework: Framework, settings: Any) -> None:
    settings.IDEMPOTENCY = {"KEY": f"{__name__}.event_id", "REQUIRED": False}
    framework.serve()
    replayed(alice, key=None, headers={"X-Event-Id": "k"})
    assert [alice.post().status_code for _ in range(2)] == [201, 201]  # without a key it runs unprotected
    assert effects() == 3


def test_a_form_that_was_parsed_already_has_no_json() -> None:
    """The CSRF check reads a form before the view, and its body can't be read again."""

    @idempotent("tests.parsed", key=FromJSON("id"), account=lambda request: "1")
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=201)

    def parsed(request: HttpRequest) -> HttpResponse:
        assert request.POST["a"] == "b"
        return view(request)

    request = RequestFactory().post("/", {"a": "b"})
    assert parsed(request).status_code == 400
