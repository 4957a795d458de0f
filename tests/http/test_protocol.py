"""The account, payload and retention of a key; well-formed and malformed keys."""

from datetime import timedelta

import pytest
from django.core.management import call_command
from django.utils import timezone

from idempotency import idempotent, signals
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import assert_refused, effects, records, replayed
from tests.http.views import plain_answer
from tests.operations import receiving
from tests.records import HOUR, expire, from_now

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.scenario_5
@pytest.mark.parametrize("purged", [False, True], ids=["not purged", "purged"])
@pytest.mark.parametrize("payload", [{"amount": 1}, {"amount": 2}], ids=["same payload", "other payload"])
def test_a_retry_past_the_retention_is_new(alice, framework, purged, payload):
    framework.serve()
    first = alice.post(data={"amount": 1}, key="k")
    expire(IdempotencyRecord.objects.get().pk)
    IdempotencyRecord.objects.update(created_at=from_now(-HOUR * 73))
    if purged:
        call_command("purge_idempotency", verbosity=0)
        assert not IdempotencyRecord.objects.exists()
    second, _ = replayed(alice, data=payload)
    assert second.status_code == 201
    assert second.content != first.content
    renewed = IdempotencyRecord.objects.get()
    assert renewed.expires_at - renewed.completed_at == timedelta(days=3)
    assert abs(renewed.created_at - timezone.now()) < timedelta(minutes=5)


@pytest.mark.scenario_5
def test_the_operations_retention_overrides_the_setting(alice, serve, settings):
    settings.IDEMPOTENCY = {"RETENTION": timedelta(hours=2)}
    own = idempotent("tests.own", retention=timedelta(hours=5))(plain_answer)
    serve(idempotent("tests.default")(plain_answer), **{"own/": own})
    for url in ("/", "/own/"):
        alice.post(url, key="k")
    kept = {record.operation: record.expires_at - record.completed_at for record in IdempotencyRecord.objects.all()}
    assert kept == {"tests.default": timedelta(hours=2), "tests.own": timedelta(hours=5)}


@pytest.mark.scenario_6
@pytest.mark.failure_46
def test_two_accounts_with_one_key_are_two_requests(alice, bob, framework):
    framework.serve()
    claimed = {"account_id": alice.user.pk, "user": "alice"}  # the account is never taken from the body
    of_alice, _ = replayed(alice, data=claimed)
    of_bob, _ = replayed(bob, data=claimed)
    assert of_alice.content != of_bob.content
    # The other account's key with another payload is not a reuse.
    replayed(bob, data={"amount": 2}, key="k2")
    replayed(alice, data={"amount": 3}, key="k2")
    for caller in (alice, bob):
        assert Transfer.objects.filter(account=caller.user).count() == 2
        assert IdempotencyRecord.objects.filter(account_id=str(caller.user.pk)).count() == 2


@pytest.mark.scenario_18
def test_no_scope_collides_with_another_by_concatenation(alice, serve):
    def protect(operation):
        return idempotent(operation, account=lambda request: request.headers["X-Account"])(plain_answer)

    serve(**{"a/": protect("x"), "b/": protect("x/k"), "c/": protect("y:x")})
    # Account, path (and so operation), and key: joined by a slash, a colon or nothing, some of them read the same.
    scopes = [("1", "/a/", "k/4"), ("1", "/b/", "4"), ("1:y", "/a/", "k"), ("1", "/c/", "k"), ("1", "/a/", "k")]
    for account, url, key in [*scopes, ("11", "/a/", "k")]:
        replayed(alice, url, key=key, headers={"X-Account": account})


@pytest.mark.scenario_9
def test_without_an_optional_key_nothing_is_kept(alice, framework):
    framework.serve(key_required=False)
    with receiving(signals.unprotected) as received:
        answers = [alice.post() for _ in range(2)]
    assert [sent["sender"].policy.key_required for sent in received] == [False, False]
    for answer in answers:
        assert (answer.status_code, answer.json()["operation"]) == (201, None)
        assert not {"Idempotency-Key", "Idempotency-Status"} & answer.headers.keys()
    assert (effects(), records()) == (2, [])
    # With a key the request is protected, and an invalid key is not treated as missing.
    replayed(alice)
    assert_refused(alice, "idempotency_key_invalid", key="a,b")


BAD_KEYS = [
    *["", " ", "  ", "\t", '""', '" "', '"', '"abc', 'abc"', 'a"c', '"a"b"', '"a" "b"', "a b", '"a b"'],
    *["a,b", "a, b", ",", "a,", '"a","b"', '"a", "b"', '"abc";v=1', '"abc"; v=1', "abc;v=1", "abc;"],
    *[r'"a\bc"', '"abc\\"', "x" * 256, f'"{"x" * 256}"', '"' + '\\"' * 256 + '"'],
    *["a\tb", "a\r\n b", "abc\n", "\nabc", "abc\x00", "a\x00b", "\x00", "\x7f", "\xa0abc"],
    *["clé", "clé".encode().decode("latin-1"), "\u2003abc", "\ud800", "a\udc80", "🔑"],
    "\uff11\uff12\uff13",  # digits, but not ASCII ones
]


@pytest.mark.scenario_9
@pytest.mark.scenario_10
@pytest.mark.failure_40
def test_a_malformed_or_missing_key_is_refused(alice, framework):
    framework.serve()
    assert "Idempotency-Key" not in assert_refused(alice, "idempotency_key_missing")
    for key in BAD_KEYS:
        refused = assert_refused(alice, "idempotency_key_invalid", HTTP_IDEMPOTENCY_KEY=key)
        assert "Idempotency-Key" not in refused, ascii(key)  # an unparsed key is not echoed


BARE = ["abc", "8e03978e-40d5-43dd-bc93-6894a57f9324", "x" * 255, r"c\d", "!#$%&'()*+-./:<=>?@[\\]^_`{|}~"]
#: The header's value, and the key in it.
GOOD_KEYS = {
    **{key: key for key in BARE},
    "ABC": "ABC",  # keys differ by their case
    f'"{"y" * 255}"': "y" * 255,
    '"' + '\\"' * 255 + '"': '"' * 255,
    '"a,b;c"': "a,b;c",
    r'"a\"b"': 'a"b',
    r'"a\\b"': r"a\b",
}


@pytest.mark.scenario_9
@pytest.mark.scenario_10
def test_each_well_formed_key_runs_and_is_echoed(alice, framework):
    framework.serve()
    for sent, key in GOOD_KEYS.items():
        for answer in replayed(alice, key=sent):
            assert (answer.status_code, answer["Idempotency-Key"]) == (201, sent)
        assert IdempotencyRecord.objects.latest("pk").idempotency_key == key
    for spelling in ('"abc"', "  abc\t", ' \t"abc" '):  # other spellings of the first key
        assert alice.post(key=spelling)["Idempotency-Replayed"] == "true"
