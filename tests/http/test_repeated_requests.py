"""The requests that ``assert_idempotent`` sends: payloads that must be unique, files, keys outside of the header."""

from __future__ import annotations

import itertools
import json
from io import BytesIO
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import JsonResponse

from idempotency import idempotent
from idempotency.http.key_sources import FromHeader, FromJSON
from idempotency.testing import ChecksNotRunWarning, Request, assert_idempotent
from testproject.models import Transfer
from tests.factories import UserFactory
from tests.http.serving import Serve
from tests.http.test_assert_idempotent import all_but, client_of, transactional
from tests.http.views import plain_answer


@transactional
def test_a_file_is_sent_each_time(serve: Serve) -> None:
    @serve
    @idempotent("kit.upload")
    def view(request: Any) -> Any:
        assert [file.read() for file in request.FILES.getlist("files")] == [b"hello", b"bytes"]
        assert request.FILES["files"].name == "a.txt"
        return plain_answer(request)

    named = BytesIO(b"bytes")
    named.name = "a.txt"
    request = Request("POST", "/", {"files": [SimpleUploadedFile("b", b"hello"), named], "amount": 1})
    checks = ["retry", "concurrent", "other_payload", "lost_response"]
    client = client_of(UserFactory())
    report = assert_idempotent(client, request, effects=Transfer.objects, leave_out=all_but(*checks))
    assert report.kept == checks


@pytest.mark.parametrize(
    ("source", "request_of"),
    [
        (FromJSON("id"), {"data": lambda key: {"id": key}, "other_payload": lambda key: {"id": key, "amount": 2}}),
        (FromHeader("X-Event"), {"headers": lambda key: {"X-Event": key}}),
    ],
    ids=["in the payload", "in another header"],
)
@pytest.mark.django_db
def test_the_key_may_be_elsewhere(serve: Serve, source: Any, request_of: dict[str, Any]) -> None:
    serve(idempotent("kit.elsewhere", key=source)(plain_answer))
    given: dict[str, Any] = {"data": {"amount": 1}, "content_type": "application/json"} | request_of
    options: dict[str, Any] = {"effects": Transfer.objects, "leave_out": all_but("retry", "other_payload", "crash")}
    other = given.pop("other_payload", None)
    client = client_of(UserFactory())
    report = assert_idempotent(client, Request("POST", "/", **given), other_payload=other, **options)
    assert report.kept == ["retry", "other_payload", "crash"]
    if other:
        with pytest.warns(ChecksNotRunWarning, match="other_payload: the payload has the key in it"):
            assert_idempotent(client, Request("POST", "/", **given), **options)


def unique(view: Any) -> Any:
    """Refuse a label that there is already, as the validator of a unique field does."""

    def refuse_twice(request: Any) -> Any:
        label = json.loads(request.body)["label"]
        if Transfer.objects.filter(label=label).exists():
            return JsonResponse({"label": ["exists"]}, status=400)
        response = view(request)
        Transfer.objects.filter(label=request.method).update(label=label)
        return response

    return refuse_twice


@transactional
def test_a_payload_that_must_be_unique_is_made_anew_for_each_check(serve: Serve) -> None:
    numbers = itertools.count()
    options: dict[str, Any] = {"content_type": "application/json"}
    serve(idempotent("kit.unique")(unique(plain_answer)))
    client, effects = client_of(UserFactory()), Transfer.objects
    checks: dict[str, Any] = {"leave_out": ["other_account", "revoked"]}
    with pytest.warns(ChecksNotRunWarning):
        report = assert_idempotent(client, Request("post", "/", {"label": "a"}, **options), effects=effects, **checks)
    assert report.kept == []
    assert all("give a callable" in reason for reason in report.not_run.values())
    labels = iter("bcc")
    checks["leave_out"] = all_but("retry")
    with pytest.warns(ChecksNotRunWarning, match=r"retry: it needs a request .* give a callable"):
        assert_idempotent(
            client, lambda: Request("post", "/", {"label": next(labels)}, **options), effects=effects, **checks
        )
    checks["leave_out"] = ["other_account", "revoked"]
    report = assert_idempotent(
        client, lambda: Request("post", "/", {"label": f"d{next(numbers)}"}, **options), effects=effects, **checks
    )
    assert report.not_run == {}


@pytest.mark.django_db
def test_a_payload_without_values_is_not_changed(serve: Serve) -> None:
    serve(idempotent("kit.empty")(plain_answer))
    client = client_of(UserFactory())
    for data, given in ((None, None), (b"as it is", b"other bytes")):
        request = Request("POST", "/", data, content_type="text/plain")
        options = {"effects": Transfer.objects, "leave_out": all_but("other_payload")}
        if given is None:
            with pytest.warns(ChecksNotRunWarning, match="other_payload: the request has no payload"):
                assert_idempotent(client, request, **options)
        else:
            assert assert_idempotent(client, request, other_payload=given, **options).kept == ["other_payload"]
