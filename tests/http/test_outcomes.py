"""Which outcomes of a run are recorded, and whether its writes are kept."""

from contextlib import ExitStack

import pytest
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.db import IntegrityError, transaction
from django.http import Http404
from django.template.response import TemplateResponse
from rest_framework import exceptions

from idempotency import PARK, REEXECUTE, Reconcile, require_claim, signals
from idempotency.conf import (
    is_recordable,
    is_recordable_unless_invalid,
)
from idempotency.models import IdempotencyRecord
from tests.http.callers import assert_nothing_kept, assert_refused, effects, records, replayed
from tests.http.serving import OUTSIDE, Framework, serve_answer
from tests.http.views import CrashError, work
from tests.operations import receiving

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.scenario_13]


class Conflict(exceptions.APIException):
    status_code = 409
    default_code = "conflict"


@pytest.mark.parametrize("status", [405, 429, 500])
def test_nothing_is_kept_of_a_transient_failure(alice, framework, status):
    framework.serve()
    assert_nothing_kept(alice, status, f"/?status={status}")


@pytest.mark.parametrize("status", [200, 204, 302, 402])
def test_a_returned_failure_commits_and_is_replayed(alice, framework, status):
    framework.serve()
    first, _ = replayed(alice, f"/?status={status}")
    assert first.status_code == status


def only_success(status):
    return status < 300


@pytest.mark.failure_93
@pytest.mark.parametrize(
    ("recordable", "status", "recorded"),
    [
        (lambda status: True, 405, 404),
        (only_success, 404, 200),
        (only_success, 425, 204),
        (is_recordable_unless_invalid, 400, 404),
        (is_recordable_unless_invalid, 422, 409),
        (lambda status: is_recordable(status) and status != 409, 409, 404),
    ],
)
def test_the_policy_decides_what_is_recorded(alice, framework, recordable, status, recorded):
    """A refused event runs again when it is delivered again."""
    framework.serve(recordable=recordable, payload=lambda request: request.body.decode())
    assert_nothing_kept(alice, status, f"/?status={status}")
    # The key stays bound to its payload: with another one, a delayed duplicate of the first request could run after it.
    assert_refused(alice, "idempotency_key_reused", data={"another": 1}, key="k")
    first, _ = replayed(alice, f"/?status={recorded}")
    assert first["Idempotency-Status"] == "executed"


@pytest.fixture
def sent():
    """The arguments sent with each signal that reports how an attempt ended."""
    with ExitStack() as stack:
        names = ("unrecorded", "released", "parked")
        yield {name: stack.enter_context(receiving(getattr(signals, name))) for name in names}


def times(sent):
    return {name: len(received) for name, received in sent.items() if received}


@pytest.mark.failure_81
@pytest.mark.parametrize(
    ("status", "policy", "name"),
    [
        (422, {"recordable": is_recordable_unless_invalid}, "unrecorded"),
        (429, {}, "unrecorded"),
        (499, {"recordable": only_success}, "unrecorded"),
        (500, {}, "released"),
        (503, {"recordable": only_success}, "released"),
        (422, {"recordable": only_success, **OUTSIDE}, "parked"),
        (422, {"recordable": only_success, "transaction": False, "recovery": REEXECUTE}, "unrecorded"),
    ],
)
def test_an_unrecorded_response_is_not_a_failure(alice, framework, sent, status, policy, name):
    framework.serve(**policy)
    assert alice.post(f"/?status={status}", key="k").status_code == status
    assert times(sent) == {name: 1}


@pytest.mark.failure_81
@pytest.mark.parametrize(
    ("error", "recordable", "name", "kept"),
    [
        (lambda: exceptions.ValidationError({"amount": ["4242"]}), is_recordable_unless_invalid, "unrecorded", None),
        (lambda: exceptions.Throttled(wait=7), None, "unrecorded", None),
        (lambda: exceptions.APIException("4242"), None, "released", "APIException: 4242"),
    ],
)
@pytest.mark.parametrize("way", [{}, {"transaction": False, "recovery": REEXECUTE}], ids=["inside", "outside"])
def test_an_error_with_an_unrecorded_response_has_no_failure_reason(
    alice, serve, sent, error, recordable, name, kept, way
):
    serve_raising(serve, "drf", error, recordable=recordable, **way)
    alice.post("/", key="k")
    assert times(sent) == {name: 1}
    assert IdempotencyRecord.objects.get().error == kept


def discard():
    require_claim().discard()


def undo():
    transaction.set_rollback(True)


@pytest.mark.parametrize("end", [discard, undo])
@pytest.mark.parametrize("status", [207, 302])
def test_a_handler_can_discard_one_response(alice, framework, sent, end, status):
    """For example, a partial success."""

    def handle(request):
        runs.append(1)
        answer, _ = work(request)
        if len(runs) < 3:
            end()
        return answer, status

    runs = []
    framework.serve(handle)
    assert assert_nothing_kept(alice, status)["Idempotency-Status"] == "not-recorded"
    assert times(sent) == {"unrecorded": 2}
    replayed(alice, key="k")


@pytest.mark.parametrize(("status", "name"), [(409, "unrecorded"), (503, "released")])
def test_a_failure_is_discarded_too(alice, framework, sent, status, name):
    framework.serve(lambda request: discard() or work(request))
    assert_nothing_kept(alice, status, f"/?status={status}")
    assert times(sent) == {name: 2}


@pytest.mark.parametrize(
    ("recovery", "record", "status"),
    [(PARK, "parked", "unknown"), (REEXECUTE, "recoverable", "not-recorded"), (print, "in_progress", "unknown")],
    ids=["PARK", "REEXECUTE", "Reconcile"],
)
def test_a_run_discarded_outside_a_transaction_is_recovered_as_declared(alice, framework, recovery, record, status):
    def handle(request):
        with transaction.atomic():
            undo()  # the handler's separate transaction, which does not decide the outcome
        if "discard" in request.GET:
            discard()
        return work(request)

    framework.serve(handle, transaction=False, recovery=Reconcile(print) if recovery is print else recovery)
    assert alice.post("/?discard=1", key="k")["Idempotency-Status"] == status
    assert (effects(), records()) == (1, [(record, 1)])
    assert alice.post(key="k2")["Idempotency-Status"] == "executed"


def test_an_unrecorded_response_that_fails_to_render_is_a_failure(alice, serve, sent):
    serve_answer(serve, lambda: TemplateResponse(None, "none.html", status=422), recordable=only_success)
    assert alice.post("/", key="k").status_code == 500
    assert times(sent) == {"released": 1}


def test_each_recordable_policy_selects_its_statuses():
    transient = [408, 425, 429, *range(500, 600)]
    assert [status for status in range(200, 600) if not is_recordable(status)] == transient
    assert [status for status in (200, 302, 402, 404, 409, 410) if not is_recordable_unless_invalid(status)] == []
    assert [status for status in (400, 408, 422, 425, 429, 500) if is_recordable_unless_invalid(status)] == []


DETERMINISTIC = {
    error.__name__: (error, status)
    for error, status in ((Http404, 404), (PermissionDenied, 403), (SuspiciousOperation, 400), (BadRequest, 400))
}

DRF_DETERMINISTIC = {
    **DETERMINISTIC,
    "ValidationError": (lambda: exceptions.ValidationError({"amount": ["wrong"]}), 400),
    "NotFound": (exceptions.NotFound, 404),
    "APIException of 409": (Conflict, 409),
    "NotAuthenticated": (exceptions.NotAuthenticated, 401),
}
CRASHES = {"an exception": (CrashError, 500), "IntegrityError": (IntegrityError, 500)}
DRF_TRANSIENT = {
    **CRASHES,
    "Throttled": (lambda: exceptions.Throttled(wait=7), 429),
    "APIException": (exceptions.APIException, 500),
}


def of_both(plain, drf):
    cases = {f"plain-{kind}": ("plain", *case) for kind, case in plain.items()}
    cases |= {f"drf-{kind}": ("drf", *case) for kind, case in drf.items()}
    return pytest.mark.parametrize(("name", "error", "status"), cases.values(), ids=cases)


def serve_raising(serve, name, error, **policy):
    """Serve a view that takes effect and then raises. Returns a list with one item for each run."""
    runs = []

    def raising(request):
        runs.append(1)
        work(request)
        raise error()

    Framework(name, serve).serve(raising, **policy)
    return runs


@of_both(DETERMINISTIC, DRF_DETERMINISTIC)
def test_a_raised_refusal_is_recorded(alice, serve, name, error, status):
    runs = serve_raising(serve, name, error)
    first, replay = replayed(alice, wrote=0)
    assert (first.status_code, first["Idempotency-Key"]) == (status, "k")
    assert replay["Content-Type"] == first["Content-Type"]
    assert_refused(alice, "idempotency_key_reused", data={"another": 1}, key="k")
    assert len(runs) == 1
    assert records() == [("completed", 1)]


@of_both(CRASHES, DRF_TRANSIENT)
def test_nothing_is_kept_of_a_crash(alice, serve, name, error, status):
    runs = serve_raising(serve, name, error)
    answer = assert_nothing_kept(alice, status)
    assert len(runs) == 2
    if status == 429:
        assert answer["Retry-After"] == "7"


def use_exception_handler(settings, handler):
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "EXCEPTION_HANDLER": handler}


def test_the_projects_exception_handler_gets_a_crash_once(alice, serve, settings):
    shown = []
    use_exception_handler(settings, lambda error, context: shown.append(error))
    serve_raising(serve, "drf", CrashError)
    assert alice.post(key="k").status_code == 500
    assert len(shown) == 1


def test_a_failing_exception_handler_leaves_a_claim_to_retry(alice, serve, settings):
    use_exception_handler(settings, lambda error, context: 1 / 0)
    runs = serve_raising(serve, "drf", Conflict)
    assert_nothing_kept(alice, 500)
    assert len(runs) == 2


@pytest.mark.parametrize("name", ["plain", "drf"])
def test_a_failure_raised_outside_of_a_transaction_is_recorded(alice, serve, name):
    serve_raising(serve, name, Http404, **OUTSIDE)
    assert replayed(alice)[0].status_code == 404


@pytest.mark.parametrize("url", ["/?crash=1", "/?status=503"])
@pytest.mark.parametrize("recovery", [PARK, REEXECUTE, Reconcile(print)], ids=["PARK", "REEXECUTE", "Reconcile"])
def test_a_crash_outside_is_recovered_as_declared(alice, framework, url, recovery):
    framework.serve(transaction=False, recovery=recovery)
    assert alice.post(url, key="k").status_code >= 500
    if recovery is PARK:
        assert records() == [("parked", 1)]
        assert_refused(alice, "idempotency_outcome_unknown", url, key="k")
    elif recovery is not REEXECUTE:  # its provider call may still be in flight, so it is reconciled after the lease
        assert records() == [("in_progress", 1)]
        assert_refused(alice, "idempotency_in_progress", url, key="k")
    else:
        assert alice.post(url, key="k").status_code >= 500
        assert effects() == 2  # harmless only if the author sends a derived key
        assert records() == [("recoverable", 2)]
