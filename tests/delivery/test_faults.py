"""Every fault of delivery, once and with few messages. ``python -m tests.delivery`` runs them in full.

On PostgreSQL only: these processes write all the time, and on SQLite they would wait for its one write lock and show
nothing of delivery. What an inbox and an outbox do on SQLite is tested in ``tests/contrib`` and ``tests/database``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.delivery.conftest import BROKER
from tests.delivery.faults import FAULTS, Fault, run
from tests.delivery.stage import Stage
from tests.delivery.tally import Verdict

pytestmark = pytest.mark.postgres

MESSAGES = 20


def strike(shared: Stage, name: str) -> Verdict:
    fault: Fault = FAULTS[name]
    verdict = run(shared, fault, MESSAGES)
    assert verdict.passed, str(verdict)
    # Said once more, where a reader of the test looks for it.
    assert (verdict.kept.doubled, verdict.kept.lost, verdict.kept.ghosts) == (0, 0, 0)
    assert verdict.struck > 0
    return verdict


@pytest.mark.scenario(7)
@pytest.mark.failure_mode(53)
@pytest.mark.parametrize("name", ["child-killed", "main-killed", "group-killed", "after-commit"])
def test_a_worker_that_is_killed_leaves_one_effect_of_each_message(shared: Stage, name: str) -> None:
    assert strike(shared, name).plain.doubled > 0


@pytest.mark.scenario(7)
@pytest.mark.failure_mode(53)
def test_a_message_delivered_again_while_its_task_runs_has_one_effect(shared: Stage) -> None:
    """Redis: the visibility timeout is shorter than the task. RabbitMQ: the connection is lost."""
    assert strike(shared, "redelivered").plain.doubled > 0


@pytest.mark.scenario(7)
@pytest.mark.failure_mode(53)
def test_a_message_published_twice_has_one_effect(shared: Stage) -> None:
    assert strike(shared, "published-twice").plain.doubled == MESSAGES


@pytest.mark.scenario(7)
@pytest.mark.failure_mode(53)
def test_a_lost_confirm_doubles_and_loses_nothing(shared: Stage) -> None:
    assert strike(shared, "confirm-lost").plain.doubled > 0


@pytest.mark.scenario(7)
@pytest.mark.parametrize("name", ["relay-killed", "relay-frozen"])
def test_a_relay_that_dies_or_comes_late_doubles_and_loses_nothing(shared: Stage, name: str) -> None:
    assert strike(shared, name).plain.doubled > 0


def test_relays_at_once_publish_nothing_twice(shared: Stage) -> None:
    verdict = strike(shared, "relays-at-once")

    assert (verdict.kept.deliveries, verdict.plain.deliveries) == (MESSAGES, MESSAGES)


@pytest.mark.failure_mode(54)
@pytest.mark.failure_mode(55)
def test_what_is_rolled_back_is_not_published_and_what_commits_late_is(shared: Stage) -> None:
    assert strike(shared, "rolled-back").plain.ghosts > 0


@pytest.mark.scenario(7)
def test_a_broker_killed_in_mid_load_doubles_nothing(shared: Stage) -> None:
    assert strike(shared, "broker-restarted").plain.doubled > 0


@pytest.mark.failure_mode(56)
def test_a_message_whose_record_was_purged_takes_effect_again_and_no_other_does(shared: Stage) -> None:
    assert strike(shared, "forgotten").plain.doubled == MESSAGES // 2


@pytest.mark.failure_mode(57)
def test_the_same_id_with_another_payload_is_put_aside(shared: Stage) -> None:
    assert strike(shared, "other-payload").dead_letters == MESSAGES


@pytest.mark.failure_mode(58)
def test_a_poison_message_is_put_aside_after_a_bounded_number_of_runs(shared: Stage) -> None:
    assert strike(shared, "poison").dead_letters == 2


def test_every_fault_has_a_test() -> None:
    here = Path(__file__).read_text()

    assert [name for name in FAULTS if f'"{name}"' not in here] == []


def test_the_broker_is_the_one_that_was_asked_for(shared: Stage) -> None:
    assert shared.broker.name == BROKER
