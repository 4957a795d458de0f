"""The response to a retry whose ``rebuild`` can't make the response from the reference."""

import pytest
from django.contrib.auth.models import Group
from django.core.exceptions import MultipleObjectsReturned, PermissionDenied
from django.db import OperationalError
from django.http import Http404, HttpResponse
from django.template.response import TemplateResponse
from rest_framework import exceptions

from idempotency import Attach, require_claim
from testproject.models import Transfer
from tests.http.callers import assert_refused, effects, records
from tests.http.serving import serve_answer
from tests.http.views import CrashError, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_51]


@pytest.fixture
def retry(alice, framework):
    """Make a request whose outcome is a reference. Returns a function that retries it with another ``rebuild``."""

    def rebuild(reference, request):
        return made[-1](reference)

    def run(request):
        require_claim().reference = "7"
        return work(request)

    made = [lambda reference: HttpResponse(reference, status=201)]
    framework.serve(run, rebuild=rebuild)
    assert alice.post(key="k").status_code == 201
    replay = alice.post(key="k")
    assert (replay.content, replay["Idempotency-Replayed"], replay["Idempotency-Status"]) == (b"7", "true", "replayed")
    return lambda rebuild: made.append(rebuild) or alice.post(key="k")


def raising(error):
    def rebuild(reference):
        raise error

    return rebuild


class GoneError(exceptions.APIException):
    status_code = 410


def assert_refusal(answer, status):
    """The response is the project's refusal, not the outcome."""
    assert (answer.status_code, "Idempotency-Replayed" in answer) == (status, False)
    assert (answer["Idempotency-Status"], answer["Idempotency-Key"]) == ("recorded", "k")
    assert (effects(), records()) == (1, [("completed", 1)])


REFUSALS = [
    *(("plain", error, status) for error, status in ((Http404(), 404), (PermissionDenied(), 403))),
    *(("drf", error, status) for error, status in ((Http404(), 404), (PermissionDenied(), 403))),
    *(("drf", error, error.status_code) for error in (exceptions.NotFound(), GoneError(), exceptions.APIException())),
]


@pytest.mark.parametrize(("framework", "error", "status"), REFUSALS, indirect=["framework"])
def test_a_refusal_of_rebuild_is_the_response(retry, caplog, error, status):
    assert_refusal(retry(raising(error)), status)
    assert not [record for record in caplog.records if record.name == "idempotency"]
    assert retry(lambda reference: HttpResponse(reference)).content == b"7"


def test_a_returned_refusal_is_not_the_outcome_either(retry):
    assert_refusal(retry(lambda reference: HttpResponse(status=410)), 410)


@pytest.mark.parametrize(
    ("recorded", "policy"), [(402, {}), (202, {"in_progress": Attach(lambda scope: "/jobs/7/")})], ids=["402", "a job"]
)
def test_a_failure_may_be_the_outcome(alice, serve, recorded, policy):
    def answer():
        require_claim().reference = "7"
        return HttpResponse(status=recorded)

    serve_answer(serve, answer, rebuild=lambda *_: HttpResponse(status=402), **policy)
    assert alice.post(key="k").status_code == recorded
    retry = alice.post(key="k")
    assert (retry.status_code, retry["Idempotency-Replayed"], retry["Idempotency-Status"]) == (402, "true", "replayed")


@pytest.mark.parametrize("make", [lambda reference: None, lambda reference: TemplateResponse(None, "none.html")])
def test_a_result_other_than_a_response_is_reported(retry, alice, make):
    retry(make)
    assert_refused(alice, "idempotency_outcome_unreadable", key="k")


@pytest.mark.parametrize("find", [Group.objects.get, Transfer.objects.get], ids=["another model", "the model"])
def test_a_deleted_object_is_reported_as_a_deleted_body(retry, alice, find):
    retry(lambda reference: find(pk=0))
    refused = assert_refused(alice, "idempotency_body_gone", key="k")
    assert (refused["Idempotency-Status"], effects()) == ("recorded", 1)


@pytest.mark.parametrize(
    ("error", "code", "retry_after"),
    [
        (OperationalError("lock not available"), "idempotency_unavailable", "1"),
        (CrashError(), "idempotency_outcome_unreadable", None),
        (MultipleObjectsReturned(), "idempotency_outcome_unreadable", None),
    ],
)
def test_an_error_of_rebuild_is_reported_and_is_not_the_outcome(retry, alice, caplog, error, code, retry_after):
    retry(raising(error))
    refused = assert_refused(alice, code, key="k")
    assert (refused["Idempotency-Status"], refused.get("Retry-After")) == ("recorded", retry_after)
    assert type(error).__name__ in caplog.text
