"""What other projects demand of a server: their cases and acceptance lists, in our words and with our views.

Where this package answers otherwise on purpose, the test asserts its answer, and its docstring gives the reason.
"""

from datetime import timedelta

import pytest
from django.http import HttpResponse, JsonResponse

from idempotency import REEXECUTE, current_claim, idempotent
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox import publish
from idempotency.outbox.models import OutboxMessage
from testproject.models import Transfer
from tests.concurrency.racing import Gate, held, race
from tests.http.callers import assert_refused, effects, records, reopen_claim, replayed
from tests.http.views import CrashError, plain_answer, work
from tests.records import expire

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

BUY, OTHER = {"amount": 5000, "until": "2026-06-30"}, {"amount": 25000, "until": "2026-09-30"}


@pytest.fixture
def served(serve):
    return serve(idempotent("tests.operation")(plain_answer))


# AdCP: the phases of the storyboard in adcontextprotocol/adcp, static/compliance/source/universal/idempotency.yaml


def test_adcp_a_request_without_a_key_is_refused(alice, served):
    assert_refused(alice, "idempotency_key_missing", data=BUY)


def test_adcp_a_replay_is_the_first_answer_a_fresh_key_a_new_resource(alice, served):
    first, replay = replayed(alice, data=BUY, key="a")
    fresh, _ = replayed(alice, data=BUY, key="b")
    assert replay.json()["id"] == first.json()["id"] != fresh.json()["id"]
    assert effects() == 2


def test_adcp_a_conflict_shows_nothing_of_the_first_request(alice, served):
    first, _ = replayed(alice, data=BUY, key="a")
    refused = assert_refused(alice, "idempotency_key_reused", data=OTHER, key="a")
    record = IdempotencyRecord.objects.get()
    shown = refused.content + str(refused.headers).encode()
    secrets = [str(record.request_hash), "5000", "25000", "amount", first["Location"]]
    assert [secret for secret in secrets if secret.encode() in shown] == []


def test_adcp_a_replay_fires_no_second_webhook(alice, serve):
    @serve
    @idempotent("tests.operation")
    def view(request):
        publish("bought", {"amount": 5000})
        return plain_answer(request)

    replayed(alice, data=BUY)
    assert OutboxMessage.objects.count() == 1


def test_adcp_new_keys_have_no_ceiling(alice, served):
    """Otherwise: AdCP demands a limit of new keys per caller, for example 60 in a second. That is the task of the
    project's throttle, which runs before the handler and knows what a caller may do."""
    assert {alice.post(key=f"k{number}").status_code for number in range(61)} == {201}


# AdCP: the ten rules for idempotency in adcontextprotocol/adcp, docs/building/by-layer/L1/security.mdx. Other
# cases test the rules 4 (a replay), 5 (another payload), 8 (a limit of new keys) and 9 (idemkit's: at once, in flight).


def test_adcp_rule_1_a_malformed_request_leaves_no_record(alice, served):
    assert_refused(alice, "idempotency_key_invalid", data=BUY, key="x" * 256)
    assert (records(), effects()) == ([], 0)


def test_adcp_rule_2_an_accepted_task_is_replayed_as_accepted(alice, serve):
    @serve
    @idempotent("tests.operation")
    def view(request):
        work(request)
        return JsonResponse({"task": Transfer.objects.latest("pk").label}, status=202)

    first = alice.post(data=BUY, key="k")
    Transfer.objects.update(label="completed")
    replay = alice.post(data=BUY, key="k")
    assert (replay.status_code, replay.content) == (202, first.content)


def test_adcp_rule_7_each_answer_declares_its_retention(alice, served):
    """Otherwise: AdCP also demands a declaration beforehand. The project's documentation has that task."""
    assert int(alice.post(data=BUY, key="k")["Idempotency-Retention"]) >= 3600


def test_adcp_rule_10_an_interrupted_call_is_made_again_under_the_same_name(alice, serve):
    """The provider's name of the call exists before the call, and a retry after a crash reuses it."""
    names = []

    @serve
    @idempotent("tests.operation", transaction=False, recovery=REEXECUTE)
    def view(request):
        names.append(current_claim().derive_key("charge"))
        if len(names) == 1:
            raise CrashError
        return plain_answer(request)

    assert [alice.post(data=BUY, key="k").status_code for _ in range(2)] == [500, 201]
    assert len(set(names)) == 1


def test_adcp_order_and_white_space_do_not_matter_but_null_does(alice, served):
    replayed(alice, data=b'{"amount": 1, "until": "2026"}')
    assert alice.post(data=b'{ "until":"2026","amount":1 }', key="k")["Idempotency-Replayed"] == "true"
    assert_refused(alice, "idempotency_key_reused", data=b'{"amount": 1, "until": "2026", "note": null}', key="k")


def test_adcp_a_retry_gets_its_answer_after_later_requests(alice, served):
    first = alice.post(data=BUY, key="turn-1")
    alice.post(data=OTHER, key="turn-2")
    assert alice.post(data=BUY, key="turn-1").content == first.content
    assert effects() == 2


def test_adcp_rule_3_a_refusal_by_the_operation_is_recorded(alice, served):
    """Otherwise: AdCP keeps only successes. Here a 4xx is an outcome, as the draft says of errors (section 2.6): a
    client whose answer was lost still gets it."""
    _, replay = replayed(alice, "/?status=402", data=BUY)
    assert replay.status_code == 402


def test_adcp_rule_6_a_key_past_its_retention_is_new(alice, served):
    """Otherwise: AdCP answers IDEMPOTENCY_EXPIRED as long as it remembers the key. The draft lets the server publish
    an expiration policy. With ``max_key_age``, a UUIDv7 that is too old is refused as expired."""
    alice.post(data=BUY, key="k")
    expire(IdempotencyRecord.objects.get().pk)
    assert "Idempotency-Replayed" not in alice.post(data=BUY, key="k")
    assert effects() == 2


def test_adcp_a_short_key_is_accepted(alice, bob, served):
    """Otherwise: AdCP advises against keys that can be guessed. Here a guessed key finds only the caller's records."""
    alice.post(data=BUY, key="1")
    assert "Idempotency-Replayed" not in bob.post(data=BUY, key="1")


# idempot-dev: the scenarios of idempot-dev/idempot-js, tests/spec/idempotency.feature


@pytest.mark.parametrize("key", ["", "x" * 256, "key,with,commas,longer-than-twenty-chars"])
def test_idempot_dev_a_malformed_key_is_refused(alice, served, key):
    assert_refused(alice, "idempotency_key_invalid", key=key)


def test_idempot_dev_duplicates_get_the_recorded_answer(alice, served):
    first = alice.post(data=BUY, key="8e03978e-40d5-43e8-bc93-6894a57f9324")
    record = IdempotencyRecord.objects.get()
    assert (record.idempotency_key, record.status) == ("8e03978e-40d5-43e8-bc93-6894a57f9324", Status.COMPLETED)
    assert record.response_status == first.status_code == 201
    for _ in range(3):
        duplicate = alice.post(data=BUY, key="8e03978e-40d5-43e8-bc93-6894a57f9324")
        assert (duplicate.status_code, duplicate.content) == (201, first.content)
        assert duplicate["Idempotency-Replayed"] == "true"
    assert (effects(), IdempotencyRecord.objects.count()) == (1, 1)


def test_idempot_dev_the_payload_under_another_key_is_another_request(alice, served):
    """Otherwise: idempot-dev refuses it with 409. The key names the operation: a client may want the same twice, and
    AdCP demands that it gets it."""
    replayed(alice, data=BUY, key="key1-12345678901234567")
    replayed(alice, data=BUY, key="key2-12345678901234567")
    assert effects() == 2


def test_idempot_dev_a_key_in_use_and_a_reused_key_are_refused(alice, served):
    alice.post(data=BUY, key="k")
    assert_refused(alice, "idempotency_key_reused", data={"baz": "qux"}, key="k")
    reopen_claim()
    assert "Retry-After" in assert_refused(alice, "idempotency_in_progress", data=BUY, key="k")


@pytest.mark.parametrize(("method", "kept"), [("GET", 0), ("PUT", 0), ("DELETE", 0), ("POST", 1), ("PATCH", 1)])
def test_idempot_dev_only_methods_that_are_not_idempotent_are_kept(alice, served, method, kept):
    assert alice.request(method, data=b"", key="k").status_code == 201
    assert len(records()) == kept


# idemkit: the HTTP scenarios of idemkit/idemkit, spec/conformance.yaml


def test_idemkit_many_at_once_run_once(alice, served):
    """Otherwise: idemkit lets all wait. Here a duplicate of a running request gets 409 with Retry-After, so that it
    holds no worker, and its retry gets the answer."""
    answers = race([lambda: alice.post(data=BUY, key="k")] * 8)
    assert effects() == 1
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert (
        len({answer.content for answer in [*answers, alice.post(data=BUY, key="k")] if answer.status_code == 201}) == 1
    )


def test_idemkit_another_payload_in_flight_is_a_conflict(alice, serve):
    """Otherwise: idemkit answers a duplicate in flight with 423, here it is the draft's 409. Another payload gets it,
    too: until the first request has an outcome, its payload is disclosed to no other request."""
    gate = Gate()

    @serve
    @idempotent("tests.operation")
    def view(request):
        answer = plain_answer(request)
        gate.pass_through()
        return answer

    with held(lambda: alice.post(data=BUY, key="k"), gate) as first:
        for payload in (BUY, OTHER):
            assert "Retry-After" in assert_refused(alice, "idempotency_in_progress", data=payload, key="k")
    assert first.result().status_code == 201


def test_idemkit_a_request_whose_lease_is_over_is_taken_over(alice, served):
    alice.post(data=BUY, key="k")
    reopen_claim(lease=timedelta(seconds=-1))
    again = alice.post(data=BUY, key="k")
    assert again.status_code == 201
    assert "Idempotency-Replayed" not in again
    assert records() == [(Status.COMPLETED, 2)]


def test_idemkit_a_server_error_is_not_recorded(alice, serve):
    failures = [CrashError, None]

    @serve
    @idempotent("tests.operation")
    def view(request):
        answer = plain_answer(request)
        if error := failures.pop(0):
            raise error
        return answer

    assert [alice.post(data=BUY, key="k").status_code for _ in range(3)] == [500, 201, 201]
    assert effects() == 1


def test_idemkit_two_tenants_with_one_key_are_two_requests(alice, bob, served):
    assert len({replayed(caller, data=BUY)[0].content for caller in (alice, bob)}) == 2


def test_idemkit_a_replay_keeps_safe_headers_only(alice, serve):
    @serve
    @idempotent("tests.operation")
    def view(request):
        work(request)
        answer = HttpResponse(status=201, headers={"Location": "/resources/abc123", "ETag": '"v1"'})
        answer.set_cookie("session", "secret-value")
        return answer

    _, replay = replayed(alice)
    assert (replay["Location"], replay["ETag"]) == ("/resources/abc123", '"v1"')
    assert not replay.cookies


def test_idemkit_an_unreadable_record_runs_nothing(alice, served):
    """Otherwise: idemkit treats it as absent and runs the operation again, which doubles its effect."""
    alice.post(data=BUY, key="k")
    IdempotencyRecord.objects.update(response_body='{"$idempotency-envelope": 7}')
    assert_refused(alice, "idempotency_outcome_unreadable", data=BUY, key="k")


def test_idemkit_an_answer_that_is_too_large_commits_nothing(alice, serve, settings):
    """Otherwise: idemkit sends it and runs the next retry again. Here nothing commits that no retry could get."""
    settings.IDEMPOTENCY = {"MAX_RESPONSE_BODY": 1024}

    @serve
    @idempotent("tests.operation")
    def view(request):
        work(request)
        return JsonResponse({"text": "x" * 2048})

    assert alice.post(key="k").json()["code"] == "idempotency_response_unrecordable"
    assert effects() == 0


# nautobot: the acceptance list of nautobot/nautobot issue 8859


def everywhere(view):
    methods = ("POST", "PUT", "PATCH", "DELETE")
    return idempotent("tests.operation", key_required=False, methods=methods)(view)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nautobot_an_optional_key_protects_each_mutating_method(alice, serve, method):
    serve(everywhere(plain_answer))
    plain = [alice.request(method, data=BUY) for _ in range(2)]
    assert (effects(), records()) == (2, [])
    assert not {"Idempotency-Key", "Idempotency-Status", "Idempotency-Replayed"} & plain[0].headers.keys()
    first, replay = replayed(alice, data=BUY, method=method, key="x" * 255)
    assert replay["Location"] == first["Location"]
    assert_refused(alice, "idempotency_key_invalid", data=BUY, method=method, key="x" * 256)


def test_nautobot_users_share_no_key(alice, bob, serve):
    serve(everywhere(plain_answer))
    assert len({replayed(caller, data=BUY)[0].content for caller in (alice, bob)}) == 2


def test_nautobot_another_body_method_or_path_is_refused(alice, serve):
    serve(**{"devices/<int:pk>/": everywhere(lambda request, pk: plain_answer(request))})
    replayed(alice, "/devices/1/", data=BUY)
    assert_refused(alice, "idempotency_key_reused", "/devices/1/", data=OTHER, key="k")
    assert_refused(alice, "idempotency_key_reused", "/devices/1/", data=BUY, key="k", method="PATCH")
    assert_refused(alice, "idempotency_key_reused", "/devices/2/", data=BUY, key="k")
