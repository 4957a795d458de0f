"""The error report of a protected view discloses no more than the unprotected view's report."""

import sys

import pytest
from django.http import HttpResponse
from django.test import RequestFactory
from django.views.debug import ExceptionReporter
from django.views.decorators.debug import sensitive_post_parameters

from idempotency import Operation, claim, idempotent, require_claim
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from idempotency.outcome import Outcome
from tests.http.callers import FORM, multipart, problem_code
from tests.http.serving import policies
from tests.http.views import CrashError

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_70, pytest.mark.once]

CARD = "4111111111111111"
KEY = "a-key-known-to-one-client-only"
ACCOUNT = "account-of-one-client"
BODIES = {
    "form": {"data": f"card={CARD}".encode(), "content_type": FORM},
    "json": {"data": f'{{"card": "{CARD}"}}'.encode(), "content_type": "application/json"},
    "multipart": multipart({"card": CARD}),
}


def crash(request):
    raise CrashError


def request_with(body):
    return RequestFactory().post("/", **BODIES[body], headers={"Idempotency-Key": KEY})


def report_of(view, body):
    request = request_with(body)  # no secret is a local variable here, because this frame is reported too
    try:
        view(request)
    except CrashError:
        return ExceptionReporter(request, *sys.exc_info()).get_traceback_html()
    raise AssertionError("the view did not crash")


@pytest.mark.parametrize("body", BODIES)
@policies
def test_a_crash_report_hides_what_the_unprotected_views_report_hides(body, policy):
    plain = report_of(sensitive_post_parameters()(crash), body)
    protected = idempotent("tests.crash", account=lambda request: ACCOUNT, **policy)(crash)
    ours = report_of(sensitive_post_parameters()(protected), body)
    assert CARD not in plain
    for secret in (CARD, ACCOUNT):
        assert secret not in ours
    assert ours.count(KEY) == plain.count(KEY)  # Django shows the headers in either case


def test_a_payload_that_cannot_be_fingerprinted_is_not_shown(caplog):
    class Opaque:
        def __repr__(self):
            return f"<Opaque {CARD}>"

    @idempotent("tests.opaque", account=lambda request: ACCOUNT, payload=lambda request: {"card": [Opaque()]})
    def view(request):
        raise NotImplementedError

    request = RequestFactory().post("/", b"", content_type="text/plain", headers={"Idempotency-Key": KEY})
    assert problem_code(view(request)) == "idempotency_payload_unreadable"
    assert "can't be fingerprinted" in caplog.text
    assert not IdempotencyRecord.objects.exists()
    report = ExceptionReporter(request, *caplog.records[-1].exc_info).get_traceback_html()
    assert CARD not in report


def test_the_report_of_a_crash_in_a_block_hides_payload_and_key():
    block = claim("tests.block", account_id=ACCOUNT, key=KEY[::-1], payload={"card": CARD[::-1]})
    with pytest.raises(CrashError) as raised, block:
        raise CrashError
    report = ExceptionReporter(None, raised.type, raised.value, raised.tb).get_traceback_html()
    frames_of_ours = report[report.index("idempotency/protocol") :]
    # The report includes this test's source, which doesn't contain the reversed values.
    for secret in (KEY[::-1], CARD[::-1]):
        assert secret not in frames_of_ours


def test_no_repr_shows_payload_body_key_or_account():
    seen = []

    @idempotent("tests.objects", account=lambda request: ACCOUNT)
    def view(request):
        claim = require_claim()
        seen.extend([claim, claim.scope, claim.ownership, claim.ownership.fence])
        return HttpResponse(CARD)

    view(request_with("json"))
    record = IdempotencyRecord.objects.get()
    seen += [
        record,
        Payload({"card": CARD}, query=CARD),
        Outcome(status=200, headers=(("Location", CARD),), body=CARD, reference=CARD),
        Scope(ACCOUNT, "tests.objects", KEY),
        Operation.declare("tests.objects.too"),
    ]
    shown = " ".join(map(repr, seen))
    assert [secret for secret in (CARD, KEY, ACCOUNT, record.request_hash) if secret in shown] == []


def test_the_report_of_an_unfingerprintable_payload_omits_its_frames():
    """The frames that write the canonical form have the payload in their local variables."""
    with pytest.raises(TypeError, match="can't be fingerprinted") as raised:
        _ = Payload({"card": [CARD], "given": object()}).request_hash
    report = ExceptionReporter(None, raised.type, raised.value, raised.tb).get_traceback_text()
    ours = report.partition("request_hash")[2]
    assert "be fingerprinted" in ours
    assert "_write" not in ours
