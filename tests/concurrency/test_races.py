"""Duplicates that arrive together. Effects are counted in the database, never from responses."""

import threading
from collections import Counter
from functools import partial

import pytest
from django.db import connection

from idempotency.http import exchange
from tests.aliases import at_level
from tests.concurrency.failures import IN_PROGRESS, just_before, problem
from tests.concurrency.racing import PATIENCE, Gate, held, race
from tests.concurrency.traces import effects, end_lease, is_replay, record
from tests.concurrency.urls import handler


@pytest.mark.scenario_1
@pytest.mark.parametrize("count", [2, 200])
def test_simultaneous_requests_with_one_key_have_one_effect(post, count):
    answers = race([post] * count)

    assert effects() == ["one"]
    assert handler.attempts == [1]
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) <= {201, 409}
    created = {answer.content for answer in answers if answer.status_code == 201}
    assert len(created) == 1
    assert sum("Idempotency-Replayed" not in answer.headers for answer in answers if answer.status_code == 201) == 1
    retry = post()
    assert (retry.status_code, {retry.content}) == (201, created)
    assert effects() == ["one"]


@pytest.mark.scenario_19
@pytest.mark.parametrize(
    "all_inside",
    [False, pytest.param(True, marks=pytest.mark.postgres)],  # SQLite has one writer at a time
)
def test_forty_concurrent_keys_take_effect_without_blocking_each_other(post, all_inside):
    everybody = threading.Barrier(40)
    if all_inside:
        handler.after = lambda request: everybody.wait(PATIENCE) and None
    answers = race([partial(post, key=f"k{n}", label=f"{n:02}") for n in range(40)])

    assert [answer.status_code for answer in answers] == [201] * 40
    assert effects() == [f"{n:02}" for n in range(40)]


@pytest.mark.parametrize(
    ("stalls", "attempts"),
    [
        # A handler that stalls inside its transaction holds SQLite's only write lock.
        pytest.param("inside its transaction", [1, 2], marks=[pytest.mark.scenario_23, pytest.mark.postgres]),
        pytest.param("before its transaction", [2, 1], marks=pytest.mark.failure_1),
    ],
)
def test_a_worker_past_its_lease_leaves_nothing_and_replays_the_winner(post, stalls, attempts):
    gate = Gate()

    def stall_before(claim, *rest):
        if claim.attempt == 1 and stalls == "before its transaction":
            gate.pass_through()

    if stalls == "inside its transaction":
        handler.after = lambda request: gate.pass_through() if handler.attempts == [1] else None
    with just_before(exchange, "running", stall_before), held(post, gate) as stalled:
        end_lease()
        winner = post()

    assert handler.attempts == attempts
    assert effects() == ["one"]
    assert (winner.status_code, winner.json()["attempt"], record().attempt) == (201, 2, 2)
    assert is_replay(stalled.result(), winner)
    for _ in range(3):
        assert post().content == winner.content
    assert effects() == ["one"]


FROZEN = {
    "in its commit": "UPDATE idempotency_record SET status = 'completed' WHERE attempt = 1",
    "in its claim": "INSERT INTO idempotency_record (account_id, operation, idempotency_key, request_hash, status, "
    "attempt, expires_at) SELECT id, 'race.inside', 'k', 'v1:0', 'in_progress', 1, now() FROM auth_user",
}


@pytest.mark.postgres
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param("in its commit", marks=pytest.mark.failure_2),
        pytest.param("in its claim", marks=pytest.mark.failure_15),
    ],
)
def test_a_request_does_not_wait_for_the_lock_of_a_frozen_worker(post, cut_off, frozen):
    """The worker never continues. If it is frozen in its commit, its lease is over."""
    if frozen == "in its commit":
        cut_off("/inside/")
    gate = Gate()

    def freeze():
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(FROZEN[frozen])
            gate.pass_through()
            cursor.execute("ROLLBACK")

    with held(freeze, gate):
        answer = post()
        assert (problem(answer), answer["Retry-After"]) == (IN_PROGRESS, "1")
    assert handler.attempts == []
    assert post().status_code == 201
    assert effects() == ["one"]


@pytest.mark.failure_16
@pytest.mark.postgres
@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_stricter_isolation_level_changes_nothing(post, level):
    with at_level(level):
        for round_number in range(5):
            answers = race([partial(post, key=f"k{round_number}", label=str(round_number))] * 20)
            assert {answer.status_code for answer in answers} <= {201, 409}
            assert effects() == [str(n) for n in range(round_number + 1)]
