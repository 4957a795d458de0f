"""When two forms under one key are the same request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import FormParser
from rest_framework.response import Response

from idempotency import idempotent
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import FORM, Caller, Serve, multipart
from tests.http.sameness import Same
from tests.http.views import plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


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
