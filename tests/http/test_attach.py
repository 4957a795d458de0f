"""An operation that starts a job: its duplicates attach to the job, and get its outcome when it has ended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import JsonResponse
from rest_framework.decorators import api_view
from rest_framework.response import Response

from idempotency import PARK, Attach, Operation, idempotent
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, Gate, Serve, claim_anew, effects, problem_code
from tests.http.views import work

pytestmark = pytest.mark.django_db(transaction=True)


def address(scope: Scope) -> str:
    return f"/jobs/{scope.derive_key('job')}/"


class Jobs:
    """One job, which runs until a test says that it has ended."""

    def __init__(self) -> None:
        self.outcome: dict[str, Any] | None = None
        self.references: list[str] = []

    def rebuild(self, reference: str, request: Any) -> Any:
        self.references.append(reference)
        if self.outcome is None:
            return JsonResponse({"state": "running"}, status=202)
        return JsonResponse(self.outcome)

    def policy(self) -> dict[str, Any]:
        return {"in_progress": Attach(address), "rebuild": self.rebuild}


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def start(request: Any) -> Any:
    work(request)
    return JsonResponse({"state": "running"}, status=202)


def expected(alice: Caller, operation: str = "tests.job", key: str = "k") -> str:
    assert alice.user is not None
    return address(Scope(str(alice.user.pk), operation, key))


@pytest.mark.parametrize("framework", ["django", "drf"])
def test_duplicates_attach_to_the_job_until_it_ends_and_then_replay_its_outcome(
    alice: Caller, serve: Serve, jobs: Jobs, framework: str
) -> None:
    def start_in_drf(request: Any) -> Response:
        work(request)
        return Response({"state": "running"}, status=202)

    operation = Operation("tests.job", **jobs.policy())
    view = (
        idempotent(operation)(start)
        if framework == "django"
        else api_view(["POST"])(idempotent(operation)(start_in_drf))
    )
    serve(view)
    for _ in range(3):
        running = alice.post(key="k")
        assert (running.status_code, running["Location"]) == (202, expected(alice))
        assert int(running["Retry-After"]) >= 1
        assert "Idempotency-Replayed" not in running  # not an outcome yet
    jobs.outcome = {"rows": 7}
    for _ in range(2):
        ended = alice.post(key="k")
        assert (ended.status_code, json.loads(ended.content)) == (200, {"rows": 7})
        assert ended["Idempotency-Replayed"] == "true"
        assert "Retry-After" not in ended
    assert effects() == 1
    assert set(jobs.references) == {expected(alice)}  # what the handler left no reference of is known by its address


def test_a_duplicate_that_comes_before_the_first_request_has_committed_is_told_the_same_address(
    alice: Caller, serve: Serve, jobs: Jobs
) -> None:
    gate = Gate(start)
    serve(idempotent("tests.job", transaction=False, recovery=PARK, **jobs.policy())(gate))
    with gate.running(lambda: alice.post(key="k")) as first:
        early = alice.post(key="k")
        assert (early.status_code, early["Location"]) == (202, expected(alice))
        assert int(early["Retry-After"]) >= 1
    assert first.answer()["Location"] == early["Location"]
    assert effects() == 1


def test_another_payload_is_refused_while_the_job_runs_and_afterwards(alice: Caller, serve: Serve, jobs: Jobs) -> None:
    serve(idempotent("tests.job", **jobs.policy())(start))
    assert alice.post(data={"amount": 1}, key="k").status_code == 202
    for outcome in (None, {"rows": 7}):
        jobs.outcome = outcome
        refused = alice.post(data={"amount": 2}, key="k")
        assert (refused.status_code, problem_code(refused)) == (422, "idempotency_key_reused")
        assert "Location" not in refused
    assert effects() == 1


def test_a_start_that_was_cut_off_is_taken_over(alice: Caller, serve: Serve, jobs: Jobs) -> None:
    serve(idempotent("tests.job", **jobs.policy())(start))
    alice.post(key="k")
    claim_anew()
    assert alice.post(key="k")["Location"] == expected(alice)  # alive, as far as anybody knows
    IdempotencyRecord.objects.update(lease_expires_at="2000-01-01T00:00Z", response_reference=None)
    assert alice.post(key="k").status_code == 202
    assert IdempotencyRecord.objects.get().attempt == 2
    assert IdempotencyRecord.objects.get().status == Status.COMPLETED


def test_a_job_that_need_not_be_started_is_an_outcome_like_any_other(alice: Caller, serve: Serve, jobs: Jobs) -> None:
    serve(idempotent("tests.job", **jobs.policy())(lambda request: JsonResponse({"why": "no"}, status=400)))
    assert alice.post(key="k").status_code == 400
    replay = alice.post(key="k")
    assert (replay.status_code, replay["Idempotency-Replayed"]) == (400, "true")
    assert jobs.references == []


def test_what_the_handler_and_the_rebuilt_answer_say_themselves_is_kept(
    alice: Caller, serve: Serve, jobs: Jobs
) -> None:
    def patient(*args: Any) -> Any:
        return JsonResponse({}, status=202, headers={"Location": "/mine/", "Retry-After": "20"})

    serve(idempotent("tests.job", in_progress=Attach(address), rebuild=patient)(patient))
    for _ in range(2):
        answer = alice.post(key="k")
        assert (answer["Location"], answer["Retry-After"]) == ("/mine/", "20")


def test_attach_needs_a_way_to_look_at_the_job_and_to_name_it() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"tests\.job.*rebuild="):
        Operation("tests.job", in_progress=Attach(address))
    with pytest.raises(ImproperlyConfigured, match="takes a callable"):
        Attach("/jobs/")  # type: ignore[arg-type]
