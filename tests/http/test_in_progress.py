"""The response to a duplicate while the record is a claim, live or abandoned."""

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import JsonResponse

from idempotency import ACCEPTED, Attach, Operation, idempotent
from idempotency.exceptions import InProgressError
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from tests.concurrency.racing import Gate, held
from tests.http.callers import assert_refused, effects, records, reopen_claim
from tests.http.serving import Framework, policies
from tests.http.views import plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.scenario_12]

PAYLOADS = ({"amount": 1}, {"amount": 2})  # the response discloses no difference between the payloads


@policies
def test_a_duplicate_of_a_running_request_gets_409_at_once(alice, serve, policy):
    gate = Gate()

    @serve
    @idempotent("tests.slow", **policy)
    def view(request):
        answer = plain_answer(request)
        gate.pass_through()
        return answer

    with held(lambda: alice.post(data={"amount": 1}, key="k"), gate) as first:
        assert effects() == (1 if policy else 0)  # not committed yet
        for payload in PAYLOADS:
            refused = assert_refused(alice, "idempotency_in_progress", data=payload, key="k")
            assert 1 <= int(refused["Retry-After"]) <= 30
            assert refused["Idempotency-Key"] == "k"
    assert first.result().status_code == 201
    assert alice.post(data={"amount": 1}, key="k").content == first.result().content
    assert effects() == 1


def test_retry_after_is_bounded_by_the_lease_and_by_the_setting(alice, framework, settings):
    framework.serve(lease=timedelta(hours=3))
    alice.post(data={"amount": 1}, key="k")
    for lease, setting, least, most in ((25, None, 1, 25), (3600, None, 30, 30), (3600, 3, 3, 3)):
        settings.IDEMPOTENCY = {} if setting is None else {"MAX_RETRY_AFTER": timedelta(seconds=setting)}
        reopen_claim(lease=timedelta(seconds=lease))  # the remainder of a three-hour lease
        for payload in PAYLOADS:
            refused = assert_refused(alice, "idempotency_in_progress", data=payload, key="k")
            assert least <= int(refused["Retry-After"]) <= most


def test_a_duplicate_gets_202_if_declared(alice, framework):
    framework.serve(in_progress=ACCEPTED)
    alice.post(data={"amount": 1}, key="k")
    reopen_claim()
    for payload in PAYLOADS:
        accepted = alice.post(data=payload, key="k")
        assert (accepted.status_code, accepted["Idempotency-Key"]) == (202, "k")
        assert 1 <= int(accepted["Retry-After"]) <= 30
        assert accepted["Idempotency-Status"] == "in-progress"
        assert accepted.json() == {"status": "in_progress", "detail": InProgressError.default_detail}
    assert effects() == 1


def address(scope):
    return f"/jobs/{scope.derive_key('job')}/"


class Jobs:
    """One job, which runs until a test sets its outcome."""

    def __init__(self):
        self.outcome = None
        self.references = []
        self.policy = {"in_progress": Attach(address), "rebuild": self.rebuild}

    def rebuild(self, reference, request):
        self.references.append(reference)
        return JsonResponse(self.outcome or {"state": "running"}, status=200 if self.outcome else 202)


@pytest.fixture
def jobs():
    return Jobs()


def start(request):
    work(request)
    return {"state": "running"}, 202


def expected(alice):
    return address(Scope(str(alice.user.pk), "tests.job", "k"))


def test_duplicates_get_the_job_and_then_its_outcome(alice, framework, jobs):
    framework.serve(start, operation="tests.job", **jobs.policy)
    for status in ("executed", "in-progress", "in-progress"):
        running = alice.post(key="k")
        assert (running.status_code, running["Location"]) == (202, expected(alice))
        assert running["Idempotency-Status"] == status
        assert running["Retry-After"] == "1"
        assert "Idempotency-Replayed" not in running  # no outcome yet
    assert "Location" not in assert_refused(alice, "idempotency_key_reused", data={"amount": 2}, key="k")
    jobs.outcome = {"rows": 7}
    for _ in range(2):
        ended = alice.post(key="k")
        assert (ended.status_code, ended.json(), ended["Idempotency-Replayed"]) == (200, {"rows": 7}, "true")
        assert ("Retry-After" in ended, ended["Idempotency-Status"]) == (False, "replayed")
    assert "Location" not in assert_refused(alice, "idempotency_key_reused", data={"amount": 2}, key="k")
    assert effects() == 1
    assert set(jobs.references) == {expected(alice)}  # the address, by default


def test_an_interrupted_start_is_taken_over(alice, serve, jobs):
    Framework("plain", serve).serve(start, operation="tests.job", **jobs.policy)
    alice.post(key="k")
    reopen_claim()
    assert alice.post(key="k")["Location"] == expected(alice)  # presumed alive
    IdempotencyRecord.objects.update(lease_expires_at="2000-01-01T00:00Z", response_reference=None)
    assert (alice.post(key="k").status_code, records()) == (202, [("completed", 2)])


def test_headers_of_the_handler_and_of_rebuild_are_kept(alice, serve):
    def patient(*args):
        return JsonResponse({}, status=202, headers={"Location": "/mine/", "Retry-After": "20"})

    serve(idempotent("tests.job", in_progress=Attach(address), rebuild=patient)(patient))
    for _ in range(2):
        answer = alice.post(key="k")
        assert (answer["Location"], answer["Retry-After"]) == ("/mine/", "20")


def test_attach_needs_a_rebuild_and_a_callable():
    with pytest.raises(ImproperlyConfigured, match=r"tests\.job.*rebuild="):
        Operation.declare("tests.job", in_progress=Attach(address))
    with pytest.raises(ImproperlyConfigured, match="takes a callable"):
        Attach("/jobs/")
