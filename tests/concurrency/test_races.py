"""Duplicates that arrive together. Effects are counted in the database, never from responses."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from django.db import connection, connections

from idempotency.http import exchange
from idempotency.models import IdempotencyRecord
from tests.concurrency.racing import (
    PATIENCE,
    Gate,
    abandon,
    effects,
    end_lease,
    end_retention,
    in_background,
    race,
    record,
)
from tests.concurrency.urls import handler

pytestmark = pytest.mark.urls("tests.concurrency.urls")

Post = Callable[..., Any]


@pytest.mark.scenario(1)
@pytest.mark.parametrize("count", [2, 200])
def test_simultaneous_requests_with_one_key_have_one_effect(post: Post, count: int) -> None:
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


@pytest.mark.scenario(19)
@pytest.mark.postgres  # SQLite has one writer at a time, whoever asks
def test_forty_keys_at_once_block_nobody(post: Post) -> None:
    everybody = threading.Barrier(40)
    handler.after = lambda request: everybody.wait(PATIENCE) and None  # only passes while all forty are inside

    answers = race([partial(post, key=f"k{n}", label=f"{n:02}") for n in range(40)])

    assert [answer.status_code for answer in answers] == [201] * 40
    assert effects() == [f"{n:02}" for n in range(40)]


@pytest.mark.scenario(19)
def test_forty_keys_at_once_all_take_effect(post: Post) -> None:
    answers = race([partial(post, key=f"k{n}", label=f"{n:02}") for n in range(40)])

    assert [answer.status_code for answer in answers] == [201] * 40
    assert effects() == [f"{n:02}" for n in range(40)]


@pytest.mark.parametrize("before", ["released", "abandoned", "past retention"])
def test_of_many_that_find_a_claimable_record_one_wins(post: Post, before: str) -> None:
    handler.before = _fail if before == "released" else lambda request: None
    post()
    handler.reset()
    if before == "abandoned":
        abandon()
        end_lease()
    if before == "past retention":
        end_retention()
    had = effects()

    answers = race([post] * 20)

    assert len(effects()) == len(had) + 1
    assert handler.attempts == [2]
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert record().attempt == 2


def _fail(request: Any) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.scenario(23)
@pytest.mark.postgres  # a handler that stalls inside its transaction holds SQLite's only write lock
def test_a_handler_that_outlived_its_lease_leaves_nothing_and_answers_as_the_winner(post: Post) -> None:
    gate = Gate()
    handler.after = lambda request: gate.pass_through() if handler.attempts == [1] else None
    with ThreadPoolExecutor() as pool:
        stalled = in_background(pool, post)
        gate.wait_until_reached()
        end_lease()
        winner = post()
        gate.open()
        late = stalled.result(PATIENCE)

    assert handler.attempts == [1, 2]
    assert effects() == ["one"]
    assert (winner.status_code, winner.json()["attempt"]) == (201, 2)
    assert (late.status_code, late.content, late["Idempotency-Replayed"]) == (201, winner.content, "true")
    for _ in range(3):
        assert post().content == winner.content
    assert effects() == ["one"]


@pytest.mark.failure_mode(1)
def test_a_worker_that_stalled_before_its_transaction_changes_nothing(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    run = exchange.run

    def stall(claim: Any, attempt: Any) -> Any:
        if claim.attempt == 1:
            gate.pass_through()
        return run(claim, attempt)

    monkeypatch.setattr(exchange, "run", stall)
    with ThreadPoolExecutor() as pool:
        stalled = in_background(pool, post)
        gate.wait_until_reached()
        end_lease()
        winner = post()
        gate.open()
        late = stalled.result(PATIENCE)

    assert handler.attempts == [2, 1]
    assert effects() == ["one"]
    assert (late.status_code, late.content) == (201, winner.content)
    assert record().attempt == 2


@pytest.mark.scenario(24)
@pytest.mark.postgres
def test_a_stale_owner_that_fails_does_not_free_the_live_claim(post: Post) -> None:
    stale, live = Gate(), Gate()

    def after(request: Any) -> None:
        if handler.attempts == [1]:
            stale.pass_through()
            _fail(request)
        live.pass_through()

    handler.after = after
    with ThreadPoolExecutor() as pool:
        first = in_background(pool, post)
        stale.wait_until_reached()
        end_lease()
        second = in_background(pool, post)
        live.wait_until_reached()
        stale.open()
        assert first.result(PATIENCE).status_code == 500

        assert (record().status, record().attempt) == ("in_progress", 2)
        assert post().status_code == 409  # a freed claim would run a third time
        live.open()
        assert second.result(PATIENCE).status_code == 201

    assert handler.attempts == [1, 2]
    assert effects() == ["one"]


@pytest.mark.scenario(12)
def test_a_lost_lease_without_an_outcome_yet_is_in_progress(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stalled worker finds its record claimed by another that has not finished."""
    run = exchange.run

    def taken_over_meanwhile(claim: Any, attempt: Any) -> Any:
        IdempotencyRecord.objects.update(attempt=2)
        return run(claim, attempt)

    monkeypatch.setattr(exchange, "run", taken_over_meanwhile)
    late = post()

    assert (late.status_code, late.json()["code"], late["Retry-After"]) == (409, "idempotency_in_progress", "1")
    assert effects() == []


@pytest.mark.failure_mode(2)
@pytest.mark.postgres
def test_a_worker_frozen_in_its_commit_is_not_waited_for(post: Post) -> None:
    """It holds the record's row, its lease is over, and it never answers."""
    post()
    abandon()
    end_lease()
    handler.reset()
    gate = Gate()

    def frozen() -> None:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("UPDATE idempotency_record SET status = 'completed' WHERE attempt = 1")
            gate.pass_through()
            cursor.execute("ROLLBACK")

    with ThreadPoolExecutor() as pool:
        zombie = in_background(pool, frozen)
        gate.wait_until_reached()
        answer = post()
        gate.open()
        zombie.result(PATIENCE)

    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_in_progress")
    assert handler.attempts == []
    assert post().status_code == 201
    assert effects() == ["one"]


@pytest.mark.failure_mode(15)
@pytest.mark.postgres
def test_an_inserter_that_does_not_commit_is_not_waited_for(post: Post, account: str) -> None:
    gate = Gate()

    def frozen() -> None:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(
                "INSERT INTO idempotency_record (account_id, operation, idempotency_key, request_hash, status, attempt,"
                " expires_at) VALUES (%s, 'race.inside', 'k', 'v1:0', 'in_progress', 1, now())",
                [account],
            )
            gate.pass_through()
            cursor.execute("ROLLBACK")

    with ThreadPoolExecutor() as pool:
        inserter = in_background(pool, frozen)
        gate.wait_until_reached()
        answer = post()
        gate.open()
        inserter.result(PATIENCE)

    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_in_progress")
    assert handler.attempts == []
    assert post().status_code == 201


@pytest.mark.failure_mode(16)
@pytest.mark.postgres
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_stricter_isolation_level_changes_nothing(post: Post, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from psycopg import IsolationLevel

    monkeypatch.setitem(
        connections["default"].settings_dict["OPTIONS"], "isolation_level", IsolationLevel[level.replace(" ", "_")]
    )
    connections["default"].close()
    for round_number in range(5):
        answers = race([partial(post, key=f"k{round_number}", label=str(round_number))] * 20)
        assert {answer.status_code for answer in answers} <= {201, 409}
        assert effects() == [str(n) for n in range(round_number + 1)]
    connections["default"].close()
