"""``assert_idempotent`` passes for a protected view, and names the promises that a wrong view breaks."""

import itertools
import re
import threading
from unittest import mock

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.http import HttpResponse, JsonResponse
from django.test import AsyncClient, Client, TestCase, override_settings
from rest_framework.authtoken.models import Token
from rest_framework.test import APIRequestFactory

from idempotency import PARK, REEXECUTE, Completed, NotExecuted, Reconcile, Unknown, idempotent, require_claim
from idempotency.testing import ChecksNotRunWarning, Request, assert_idempotent
from idempotency.testing.checks import concurrent
from idempotency.testing.trial import NotRun
from testproject.models import Transfer
from tests.factories import TokenFactory, UserFactory
from tests.http.views import plain_answer

transactional = pytest.mark.django_db(transaction=True)


EVERY_CHECK = ["new_key", "retry", "concurrent", "other_payload", "other_account"]
EVERY_CHECK += ["crash", "lost_response", "expiry", "revoked"]


#: Effects outside the database, which no rollback undoes.
ledger = []


def request_to(path="/"):
    return Request("POST", path, {"amount": 1, "labels": ["a", None], "urgent": True}, content_type="application/json")


def take_token(user):
    Token.objects.filter(user=user).delete()


def client_of(user):
    return Client(headers={"Authorization": f"Token {TokenFactory(user=user).key}"})


def examine(path="/", *, revoke=take_token, **options):
    """Run ``assert_idempotent`` on the view at ``path``, with every check by default."""
    alice, bob = UserFactory(is_staff=True), UserFactory(is_staff=True)
    ledger.clear()
    given = {"effects": Transfer.objects.all(), "other_client": client_of(bob), "revoke": lambda: revoke(alice)}
    return assert_idempotent(client_of(alice), request_to(path), **given | options)


def broken(match="1 of its promises broke", **options):
    """The report's text about each broken promise, by the name of its check."""
    with pytest.raises(AssertionError, match=match) as raised:
        examine(**options)
    paragraphs = [paragraph.partition(": ") for paragraph in str(raised.value).split("\n\n")]
    return {name: text for name, _, text in paragraphs if name in EVERY_CHECK}


def all_but(*names):
    return [name for name in EVERY_CHECK if name not in names]


@pytest.mark.urls("tests.http.views")
@pytest.mark.parametrize("kind", ["function", "async_function", "mixin_model_viewset"])
@transactional
def test_a_protected_view_passes_every_check(kind):
    report = examine(f"/kinds/{kind}/")
    assert (report.kept, report.not_run) == (EVERY_CHECK, {})
    assert str(report) == f"POST /kinds/{kind}/\n\nKept: {', '.join(EVERY_CHECK)}"


def pay(request):
    ledger.append(1)
    return JsonResponse({"paid": len(ledger)}, status=201)


def count_payments():
    return len(ledger)


def cached(view):
    answers = {}

    def answer_of_payload(request):
        return answers.get(request.body) or answers.setdefault(request.body, view(request))

    return answer_of_payload


def signed(view):
    numbers = itertools.count()

    def sign(request):
        response = view(request)
        response.content += b" %d" % next(numbers)
        return response

    return sign


def in_a_dictionary(view):
    """Remember the keys in a dictionary, read before the effect and written after it."""
    answers = {}
    together = threading.Barrier(4)

    def remembered(request):
        key = (request.user.pk, request.headers["Idempotency-Key"])
        if key not in answers:
            if threading.current_thread() is not threading.main_thread():
                together.wait(60)
            answers[key] = view(request)
        return answers[key]

    return remembered


MUTANTS = {
    "unprotected": (
        lambda view: view,
        {
            "retry": "took effect again (2 effects instead of 1)",
            "concurrent": "(5 effects instead of 1)",
            "other_payload": "took effect, too",
            "crash": "no outcome was recorded",
            "lost_response": "(3 effects instead of 1)",
        },
    ),
    "a permission below": (
        lambda view: idempotent("kit.order")(
            lambda request: view(request) if request.user.is_staff else HttpResponse(status=403)
        ),
        {"revoked": "below every decorator that checks"},
    ),
    "a cache of responses above": (
        lambda view: cached(idempotent("kit.cached")(view)),
        {"new_key": "Look for a response cache"},
    ),
    "one account for all": (
        idempotent("kit.account", account=lambda request: "all"),
        {"other_account": "it can detect the first account's operation"},
    ),
    "the payload ignored": (
        idempotent("kit.payload", payload=lambda request: None),
        {"other_payload": "payload= must return every field"},
    ),
    "a dictionary": (
        in_a_dictionary,
        {
            "concurrent": "took effect other than once (4",
            "other_payload": "It must be refused",
            "crash": "no outcome",
            "lost_response": "As for concurrent",
        },
    ),
    "an answer that differs": (
        lambda view: signed(idempotent("kit.signed")(view)),
        {
            "retry": "Put every decorator that changes the answer below @idempotent",
            "concurrent": "",
            "lost_response": "",
        },
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@transactional
def test_each_mistake_breaks_the_expected_promises(mutant, serve):
    wrap, expected = MUTANTS[mutant]
    serve(wrap(plain_answer))
    dismiss = lambda user: User.objects.filter(pk=user.pk).update(is_staff=False)  # noqa: E731
    found = broken("of its promises broke", revoke=dismiss if mutant == "a permission below" else take_token)
    assert found.keys() == expected.keys()
    assert [name for name, text in expected.items() if text not in found[name]] == []


def pay_and_begin(request):
    pay(request)
    require_claim().begin()
    return plain_answer(request)


def with_a_reference(request):
    require_claim().reference = "running"
    return plain_answer(request)


FOUND = Reconcile(lambda record: Completed(JsonResponse({"paid": len(ledger)}, status=201)))
UNKNOWN = Reconcile(lambda record: Unknown())
SAME_ANSWER = ["retry", "lost_response"]


@pytest.mark.parametrize(
    ("view", "policy", "checks"),
    [
        *[(pay, {"transaction": False, "recovery": recovery}, ["crash"]) for recovery in (FOUND, UNKNOWN, PARK)],
        (transaction.atomic(plain_answer), {"transaction": False, "recovery": PARK}, ["lost_response"]),
        (pay_and_begin, {"transaction": False, "recovery": REEXECUTE}, all_but()),
        (signed(plain_answer), {}, SAME_ANSWER),  # as the advice for a differing answer recommends
        (with_a_reference, {"rebuild": lambda reference, request: HttpResponse(f"still {reference}")}, SAME_ANSWER),
        (plain_answer, {"redact": lambda *outcome: b"{}"}, SAME_ANSWER),  # only its body may differ
    ],
    ids=["found", "unknown", "parked", "a transaction without callbacks", "begin()", "signed", "rebuilt", "redacted"],
)
@transactional
def test_a_correct_policy_passes(view, policy, checks, serve):
    serve(idempotent("kit.right", **policy)(view))
    effects = count_payments if view is pay else Transfer.objects
    assert examine(effects=effects, leave_out=all_but(*checks)).kept == checks


RUN_AGAIN = {"transaction": False, "recovery": REEXECUTE}
FINDING_NOTHING = {"transaction": False, "recovery": Reconcile(lambda record: NotExecuted())}
REDACTED = {"redact": lambda *outcome: b"{}", "recorded_headers": []}


@pytest.mark.parametrize(
    ("view", "policy", "check", "text"),
    [
        (pay, {}, "crash", "The effect is not in the record's transaction"),
        (pay, RUN_AGAIN, "crash", "REEXECUTE needs a key from current_claim().derive_key(…)"),
        (
            lambda request: pay(request) and plain_answer(request),
            RUN_AGAIN,
            "crash",
            "current_claim().begin() before the first row",
        ),
        (pay_and_begin, {"transaction": False, "recovery": FOUND}, "crash", "must first write the handler's rows"),
        (pay, FINDING_NOTHING, "crash", "A reconciler must find what has happened"),
        (pay, {**RUN_AGAIN, "recordable": lambda status: status == 200}, "retry", "(2 effects instead of 1)"),
        (plain_answer, REDACTED, "retry", "instead of"),
    ],
    ids=[
        "not declared",
        "run again",
        "a row run again",
        "rows not written",
        "a reconciler that finds nothing",
        "not recorded",
        "a redacted header",
    ],
)
@transactional
def test_a_repeated_effect_or_a_differing_answer_is_reported(view, policy, check, text, serve):
    serve(idempotent("kit.wrong", **policy)(view))
    effects = count_payments if view is pay else Transfer.objects
    assert text in broken(effects=effects, leave_out=all_but(check))[check]


def pay_once(request):
    """A provider that deduplicates by the derived key, for longer than the record is kept."""
    key = require_claim().derive_key("payment")
    if key not in paid:
        paid.add(key)
        ledger.append(1)
    return plain_answer(request)


paid = set()


@pytest.mark.parametrize("policy", [RUN_AGAIN, FINDING_NOTHING], ids=["run again", "reconcile"])
@transactional
def test_a_provider_that_deduplicates_after_the_retention_passes(policy, serve):
    serve(idempotent("kit.deduplicated", **policy)(pay_once))
    assert examine(effects=count_payments, leave_out=all_but("expiry")).kept == ["expiry"]


@pytest.mark.parametrize("policy", [{}, RUN_AGAIN], ids=["transaction", "run again"])
@transactional
def test_a_new_request_without_an_effect_after_the_retention_is_reported(policy, serve):
    """A cache of answers by key, which is not marked as a replay."""
    answers = {}
    protected = idempotent("kit.cached", **policy)(plain_answer)

    @serve
    def view(request):
        key = request.headers["Idempotency-Key"]
        if key not in answers:
            answers[key] = protected(request)
        return answers[key]

    assert "did not make one new request" in broken(effects=Transfer.objects, leave_out=all_but("expiry"))["expiry"]


@transactional
def test_an_effect_lost_by_a_crash_after_the_commit_is_reported(serve):
    @serve
    @idempotent("kit.callback")
    def view(request):
        transaction.on_commit(lambda: ledger.append(1))
        return plain_answer(request)

    assert "on_commit() callback" in broken(effects=count_payments)["lost_response"]
    assert examine(effects=Transfer.objects).kept == EVERY_CHECK  # a callback's effect that may be lost isn't counted


@pytest.mark.parametrize(
    ("check", "status", "text"),
    [
        ("concurrent", 500, "A duplicate must get the outcome, or a status to retry"),
        ("other_account", 500, "uses the client's key as if no other account could have it"),
        ("expiry", 500, "It must make a new request"),
        ("crash", 201, "but there are 0 effects instead of 1"),
        ("crash", 500, "Look for state that outlives the transaction"),
    ],
)
@transactional
def test_a_wrong_answer_to_a_known_key_is_reported(check, status, text, serve):
    seen = set()

    protected = idempotent("kit.duplicates")(plain_answer)

    @serve
    def view(request):
        key = request.headers["Idempotency-Key"]
        if key in seen:
            return HttpResponse(status=status)
        seen.add(key)
        return protected(request)

    assert text in broken(leave_out=all_but(check))[check]


@transactional
def test_a_view_that_fails_for_the_other_account_is_reported_as_such(serve):
    accounts = set()

    @serve
    @idempotent("kit.first_account")
    def view(request):
        accounts.add(request.user.pk)
        return HttpResponse(status=500) if len(accounts) > 1 else plain_answer(request)

    advice = broken(leave_out=all_but("other_account"))["other_account"]
    assert "The view fails for this account" in advice
    assert "@idempotent" not in advice


@override_settings(ROOT_URLCONF="tests.http.views")
class KitInTestCase(TestCase):
    """Other threads can't read the uncommitted transaction of a TestCase."""

    def test_checks_with_threads_or_without_arguments_are_not_run(self):
        client = client_of(UserFactory())
        with pytest.warns(ChecksNotRunWarning) as warned:
            report = assert_idempotent(client, request_to("/kinds/function/"), effects=Transfer.objects)
        assert report.kept == all_but(*report.not_run)
        reasons = {"concurrent": "TransactionTestCase", "other_account": "other_client=", "revoked": "revoke="}
        assert report.not_run.keys() == reasons.keys()
        for check, reason in reasons.items():
            assert reason in report.not_run[check]
            assert f"{check}: {report.not_run[check]}" in str(warned[0].message)
        assert warned[0].filename == __file__

    def test_threads_do_not_share_a_database_in_memory(self):
        with (
            mock.patch.object(connection, "in_atomic_block", new=False),
            mock.patch.object(connection, "is_in_memory_db", return_value=True, create=True),
            pytest.raises(NotRun, match="an SQLite database in memory"),
        ):
            concurrent(mock.Mock())

    def test_a_mistake_is_reported(self):
        left_out = all_but("retry", "concurrent", "crash")
        found = broken("2 of its promises broke", path="/unprotected/", leave_out=left_out)
        assert found.keys() == {"retry", "crash"}

    def test_a_check_left_out_gives_no_warning(self):
        report = examine("/kinds/function/", leave_out=["concurrent"])
        assert report.left_out == ["concurrent"]
        assert (report.kept, report.not_run) == (all_but("concurrent"), {})


def fail(request):
    pay(request)
    return HttpResponse(status=503)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda request: HttpResponse("no", status=400), "was answered 400 'no', and `effects` counted 0"),
        (lambda request: HttpResponse(), "was answered 200 '', and `effects` counted 0"),
        (fail, "was answered 503 '' although it took effect"),
    ],
    ids=["a refusal", "no effect", "a failure with an effect"],
)
@pytest.mark.django_db
def test_a_first_request_without_a_clear_effect_is_refused(view, message, serve):
    serve(idempotent("kit.beginning", transaction=False, recovery=PARK)(view))
    with pytest.raises(AssertionError, match=re.escape(message)):
        examine(effects=count_payments)


@transactional
def test_an_error_of_the_first_request_is_raised(serve):
    def view(request):
        raise LookupError("mine")

    serve(idempotent("kit.fails")(view))
    with pytest.raises(LookupError, match="mine"):
        examine()


def test_a_client_of_another_kind_is_refused():
    for clients in ({"client": AsyncClient()}, {"client": Client(), "other_client": APIRequestFactory()}):
        with pytest.raises(TypeError, match="also serve async views"):
            assert_idempotent(request=request_to(), effects=count_payments, **clients)


def test_a_check_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"There is no check 'retries'\. There are new_key, retry, "):
        assert_idempotent(Client(), request_to(), effects=count_payments, leave_out=["retry", "retries"])
