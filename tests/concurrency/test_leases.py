"""Leases: renewal by hand and by heartbeat, loss, and what a handler may do after a loss."""

import threading
from unittest.mock import Mock

import pytest
from django.db import connection

from idempotency import PARK, claim, require_claim
from idempotency.exceptions import LeaseLostError, UnavailableError
from idempotency.models import IdempotencyRecord
from idempotency.store import store_for
from tests.concurrency.racing import Gate, elsewhere, held
from tests.concurrency.traces import effects, end_lease, is_replay, record
from tests.concurrency.urls import BRIEF, handler
from tests.providers import eventually


def lease_left():
    return store_for("default").read(record().scope).lease_left


@pytest.mark.parametrize("path", ["/inside/", "/again/"])
def test_a_renewal_restarts_the_lease_and_is_visible_at_once(post, path):
    left = []

    def renew(request):
        if connection.vendor == "sqlite" and path == "/inside/":
            # No other connection can write while this transaction is open, so the lease can't be ended.
            require_claim().renew()
            left.append(60)
            return
        elsewhere(end_lease)
        require_claim().renew()
        left.append(elsewhere(lease_left))

    handler.after = renew
    assert post(path).status_code == 201
    assert 0 < left[0] <= 60
    assert effects() == ["one"]


# On SQLite an open transaction prevents a take-over.
@pytest.mark.parametrize("path", [pytest.param("/inside/", marks=pytest.mark.postgres), "/again/"])
def test_a_lost_lease_surfaces_in_the_handler_before_its_next_effect(post, path):
    winner = []

    def overtaken(request):
        current = require_claim()
        if current.attempt > 1:
            return
        elsewhere(end_lease)
        winner.append(elsewhere(lambda: post(path)))
        for stopped in (current.renew, current.renew, current.ensure_owned, lambda: current.derive_key("x")):
            with pytest.raises(LeaseLostError):
                stopped()
        current.derive_text("x")  # raises, and ends the handler

    handler.before = overtaken
    assert is_replay(post(path), winner[0])
    assert effects() == ["one"]


def test_a_heartbeat_keeps_the_lease_of_a_handler_that_takes_longer(post, often):
    """Whenever the lease is over, the heartbeat renews it, and a duplicate finds a live claim."""
    duplicates = []

    def wait(request):
        for _ in range(3):
            elsewhere(end_lease)
            assert eventually(lambda: elsewhere(lease_left) > 0)
            duplicates.append(elsewhere(lambda: post("/long-lease/")))

    handler.before = wait
    answer = post("/long-lease/")
    assert (answer.status_code, answer.json()["attempt"]) == (201, 1)
    assert [duplicate.status_code for duplicate in duplicates] == [409] * 3
    assert effects() == ["one"]
    assert eventually(lambda: not heartbeats())


@pytest.mark.failure_4
def test_a_heartbeat_ends_at_its_cap_and_the_claim_is_then_lost(post):
    """The worker hangs while its heartbeat continues. After the cap the lease ends, and another attempt wins."""
    gate = Gate()

    def hang(request):
        if require_claim().attempt == 1:
            gate.pass_through()
            require_claim().ensure_owned()

    handler.before = hang
    with held(lambda: post("/capped/"), gate) as hung:
        assert eventually(lambda: lease_left() <= 0)
        winner = post("/capped/")
        assert winner.json()["attempt"] == 2
        assert eventually(lambda: not heartbeats())
    assert is_replay(hung.result(), winner)
    assert (handler.attempts, effects()) == ([1, 2], ["one"])


def heartbeats():
    return [thread for thread in threading.enumerate() if thread.name.startswith("idempotency-renewer-")]


@pytest.mark.failure_4
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "error", [UnavailableError, MemoryError]
)  # the thread survives the first error and dies of the second
def test_a_heartbeat_that_fails_stops_the_work_before_its_next_effect(error, post, monkeypatch):
    monkeypatch.setattr(type(store_for("default")), "set_lease", Mock(side_effect=error))

    def wait_for_the_end(request):
        assert eventually(lambda: require_claim().lost)
        require_claim().derive_key("provider.charge")

    handler.before = wait_for_the_end
    assert post("/heartbeat/").status_code == 409
    assert effects() == []


def test_a_heartbeat_that_finds_the_lease_lost_marks_the_claim(post):
    winner = []

    def overtaken(request):
        if require_claim().attempt > 1:
            return
        require_claim().ownership.held_until += 3600  # so that only the renewal detects the loss
        IdempotencyRecord.objects.update(attempt=5, lease_expires_at="2000-01-01T00:00Z")
        assert eventually(lambda: require_claim().lost)
        winner.append(elsewhere(lambda: post("/heartbeat/")))
        require_claim().ensure_owned()

    handler.before = overtaken
    late = post("/heartbeat/")
    assert winner[0].json()["attempt"] == 6
    assert late.content == winner[0].content


def test_a_heartbeat_inside_a_transaction_renews_if_takeover_is_possible(post):
    """On SQLite no attempt could take over, and a heartbeat would wait for the handler's lock."""
    seen = []

    def expiry():
        return elsewhere(lambda: record().lease_expires_at)

    def work(request):
        if connection.vendor != "sqlite":
            at_first = expiry()
            assert eventually(lambda: expiry() > at_first)  # as others see it, while this transaction is open
        seen.append(len(heartbeats()))

    handler.before = work
    assert post("/heartbeat-inside/").json()["attempt"] == 1
    assert seen == [0 if connection.vendor == "sqlite" else 1]
    assert effects() == ["one"]


@pytest.mark.django_db
def test_in_a_test_case_a_lease_is_renewed_on_the_tests_own_connection():
    policy = {"transaction": False, "recovery": PARK, "lease": BRIEF, "heartbeat": 10 * BRIEF}
    with claim("tests.beating_block", account_id="1", key="k", **policy) as run:
        assert eventually(lambda: not heartbeats())  # no other connection sees the record
        require_claim().renew()
        IdempotencyRecord.objects.update(attempt=2)
        with pytest.raises(LeaseLostError):
            require_claim().renew()
        IdempotencyRecord.objects.update(attempt=1)
        run.result = 1
    assert record().status == "completed"
