"""Helpers for a project's tests: record states, clients that send keys, ``assert_idempotent``'s requests, TestCase."""

import itertools
import json
from io import BytesIO

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import JsonResponse
from django.test import TestCase, override_settings
from rest_framework.test import APIClient

from idempotency import PARK, current_claim, idempotent
from idempotency.http.key_sources import FromHeader, FromJSON
from idempotency.models import IdempotencyRecord
from idempotency.testing import (
    ChecksNotRunWarning,
    IdempotentClient,
    IdempotentClientMixin,
    Request,
    abandoned,
    assert_idempotent,
    completed,
    expired,
    in_progress,
)
from testproject.models import Charge, Transfer
from tests.factories import TokenFactory, UserFactory
from tests.http.callers import effects, problem_code
from tests.http.test_assert_idempotent import all_but, client_of, transactional
from tests.http.views import KINDS, plain_answer
from tests.records import make_records


@pytest.fixture
def case(request):
    """Django's isolation of the test. Request it before any fixture that writes."""
    request.getfixturevalue(request.param)


def other_answer():
    return JsonResponse({"by": "another attempt"}, status=202)


#: The response to a retry in each state: the status, the problem's code, and the number of effects afterwards.
STATES = {
    "in progress": (in_progress, 409, "idempotency_in_progress", 1),
    "abandoned": (abandoned, 201, "", 2),
    "expired": (expired, 201, "", 2),
    "completed": (lambda record: completed(record, other_answer()), 202, "", 1),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", ["db", "transactional_db"], indirect=True)
def test_a_retry_finds_the_state(case, state, serve, alice):
    bring, status, code, wrote = STATES[state]
    serve(idempotent("kit.states")(plain_answer))
    alice.post(key="k")
    record = bring("k")
    assert record == IdempotencyRecord.objects.get()
    assert bring(record).status == record.status  # idempotent, and accepts the record
    retry = alice.post(key="k")
    assert retry.status_code == status
    assert effects() == wrote
    if code:
        assert problem_code(retry) == code
    if state == "completed":
        assert (retry.content, retry["Idempotency-Replayed"]) == (other_answer().content, "true")


@pytest.mark.django_db
def test_a_claim_moves_from_one_state_to_another(serve, alice):
    serve(idempotent("kit.parking", transaction=False, recovery=PARK)(plain_answer))
    alice.post(key="k")
    for bring, code in ((abandoned, "idempotency_outcome_unknown"), (in_progress, "idempotency_in_progress")):
        bring("k")
        assert problem_code(alice.post(key="k")) == code
    for state in (in_progress, abandoned):  # retention ends what is known
        state("k")
        expired("k")
        assert problem_code(alice.post(key="k")) == "idempotency_outcome_unknown"
        assert effects() == 1
    completed("k", other_answer())
    expired("k")
    assert alice.post(key="k").status_code == 201


@pytest.mark.django_db
def test_an_ambiguous_or_missing_record_is_refused():
    with pytest.raises(LookupError, match=r"No record has the key .*Send the request to a protected view first"):
        in_progress("unused")
    for account in "12":
        make_records(account_id=account, idempotency_key="shared", operation="kit.undeclared")
    with pytest.raises(LookupError, match=r"Several records have the key .*Pass one of the records"):
        expired("shared")
    with pytest.raises(LookupError, match=r"No operation 'kit\.undeclared' is declared"):
        in_progress(IdempotencyRecord.objects.first())


class IdempotentAPIClient(IdempotentClientMixin, APIClient): ...


def test_a_client_sends_a_new_key_with_each_mutating_request():
    api_client = IdempotentAPIClient()

    def key_of(client, method, **options):
        return getattr(client, method)("/health/", **options).wsgi_request.headers.get("Idempotency-Key")

    for client in (IdempotentClient(), api_client):
        sent = {key_of(client, method) for method in ("post", "put", "patch", "delete")}
        assert len(sent - {None}) == 4
        assert {key_of(client, method) for method in ("get", "head", "options")} == {None}
        assert key_of(client, "post", headers={"Idempotency-Key": "given"}) == "given"
    assert key_of(IdempotentClient(headers={"Idempotency-Key": "always"}), "post") == "always"
    api_client.credentials(HTTP_IDEMPOTENCY_KEY="credential")
    assert key_of(api_client, "post") == "credential"


@transactional
def test_a_file_is_sent_each_time(serve):
    @serve
    @idempotent("kit.upload")
    def view(request):
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
def test_the_key_may_be_elsewhere(serve, source, request_of):
    serve(idempotent("kit.elsewhere", key=source)(plain_answer))
    given = {"data": {"amount": 1}, "content_type": "application/json"} | request_of
    options = {"effects": Transfer.objects, "leave_out": all_but("retry", "other_payload", "crash")}
    other = given.pop("other_payload", None)
    client = client_of(UserFactory())
    report = assert_idempotent(client, Request("POST", "/", **given), other_payload=other, **options)
    assert report.kept == ["retry", "other_payload", "crash"]
    if other:
        with pytest.warns(ChecksNotRunWarning, match="other_payload: the payload contains the key"):
            assert_idempotent(client, Request("POST", "/", **given), **options)


def unique(view):
    """Refuse an existing label, as the validator of a unique field does."""

    def refuse_twice(request):
        label = json.loads(request.body)["label"]
        if Transfer.objects.filter(label=label).exists():
            return JsonResponse({"label": ["exists"]}, status=400)
        response = view(request)
        Transfer.objects.filter(label=request.method).update(label=label)
        return response

    return refuse_twice


@transactional
def test_a_unique_payload_is_made_again_for_each_check(serve):
    serve(idempotent("kit.unique")(unique(plain_answer)))
    client = client_of(UserFactory())

    def check(labels, *left_out):
        def request(label):
            return Request("post", "/", {"label": label}, content_type="application/json")

        given = request(labels) if isinstance(labels, str) else lambda: request(labels())
        return assert_idempotent(client, given, effects=Transfer.objects, leave_out=left_out)

    with pytest.warns(ChecksNotRunWarning):
        report = check("a", "other_account", "revoked")
    assert report.kept == []
    assert all("pass a callable" in reason for reason in report.not_run.values())
    with pytest.warns(ChecksNotRunWarning, match=r"retry: it needs a request .* pass a callable"):
        check(iter("bcc").__next__, *all_but("retry"))
    assert check(map("d{}".format, itertools.count()).__next__, "other_account", "revoked").not_run == {}


@pytest.mark.django_db
def test_a_payload_without_values_is_not_changed(serve):
    serve(idempotent("kit.empty")(plain_answer))
    client = client_of(UserFactory())
    options = {"effects": Transfer.objects, "leave_out": all_but("other_payload")}
    with pytest.warns(ChecksNotRunWarning, match="other_payload: the request has no payload"):
        assert_idempotent(client, Request("POST", "/", None, content_type="text/plain"), **options)
    request = Request("POST", "/", b"as it is", content_type="text/plain")
    assert assert_idempotent(client, request, other_payload=b"other bytes", **options).kept == ["other_payload"]


@override_settings(ROOT_URLCONF="tests.http.views")
class ProtectedViewsInTestCase(TestCase):
    """Django's own TestCase wraps every test in a transaction that it never commits."""

    def setUp(self):
        token = TokenFactory()
        self.headers = {"Authorization": f"Token {token.key}"}

    def post(self, url, key, data=None):
        return self.client.post(
            url, data or {}, content_type="application/json", headers={**self.headers, "Idempotency-Key": key}
        )

    def test_every_kind_of_view_works(self):
        for count, kind in enumerate(KINDS, start=1):
            url = f"/kinds/{kind}/"
            first, replay = self.post(url, kind), self.post(url, kind)
            assert first.status_code == 201, kind
            assert (replay.content, replay["Idempotency-Replayed"]) == (first.content, "true")
            assert self.post(url, kind, {"amount": 2}).status_code == 422
            assert effects() == count

    def test_an_unrecorded_run_is_rolled_back_and_the_test_continues(self):
        self.client.raise_request_exception = False
        for kind in KINDS:
            url = f"/kinds/{kind}/"
            assert self.post(f"{url}?crash=1", f"{kind}-crash").status_code == 500
            assert self.post(f"{url}?status=503", f"{kind}-busy").status_code == 503, kind
            assert effects() == 0
            assert current_claim() is None

    def test_captured_on_commit_callbacks_are_the_projects_only(self):
        with self.captureOnCommitCallbacks() as callbacks:
            assert self.post("/kinds/function/", "k").status_code == 201
        assert callbacks == []

    async def test_the_async_client_works(self):
        headers = {**self.headers, "Idempotency-Key": "k"}
        answers = [
            await self.async_client.post("/kinds/async_function/", {}, content_type="application/json", headers=headers)
            for _ in range(2)
        ]
        assert (answers[0].status_code, answers[1].content) == (201, answers[0].content)

    @override_settings(ROOT_URLCONF="testproject.urls")
    def test_a_failure_that_drf_raises_is_recorded_and_the_test_continues(self):
        refused, replay = (self.post("/charges/", "k", {"amount": 0}) for _ in range(2))
        assert refused.status_code == 400
        assert (replay.content, replay["Idempotency-Replayed"]) == (refused.content, "true")
        assert Charge.objects.count() == 0


@pytest.mark.usefixtures("atomic_requests")
class ProtectedViewsInTestCaseUnderAtomicRequests(ProtectedViewsInTestCase):
    pass
