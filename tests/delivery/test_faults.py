"""Every fault of delivery, once and with few messages. ``python -m tests.delivery`` runs them in full.

On PostgreSQL only: these processes write all the time, and on SQLite they would wait for its one write lock and show
nothing of delivery. What an inbox and an outbox do on SQLite is tested in ``tests/contrib`` and ``tests/database``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.delivery import names
from tests.delivery.conftest import BROKER
from tests.delivery.faults import FAULTS, run
from tests.delivery.stage import Stage
from tests.delivery.tally import Verdict

pytestmark = pytest.mark.postgres

MESSAGES = 20


def case(
    name: str,
    shows: Callable[[Verdict], bool] = lambda verdict: verdict.plain.doubled > 0,
    *,
    scenario: int | None = None,
    failure_modes: tuple[int, ...] = (),
) -> Any:
    """A fault, what must have been seen besides, and which scenario and failure modes it is about."""
    marks = [pytest.mark.failure_mode(number) for number in failure_modes]
    marks += [] if scenario is None else [pytest.mark.scenario(scenario)]
    return pytest.param(name, shows, marks=marks, id=name)


def nothing_came_twice(verdict: Verdict) -> bool:
    return (verdict.kept.deliveries, verdict.plain.deliveries) == (MESSAGES, MESSAGES)


CASES = (
    case("child-killed", scenario=7, failure_modes=(53,)),
    case("main-killed", scenario=7, failure_modes=(53,)),
    case("group-killed", scenario=7, failure_modes=(53,)),
    case("after-commit", scenario=7, failure_modes=(53,)),
    case("redelivered", scenario=7, failure_modes=(53,)),
    case("published-twice", lambda found: found.plain.doubled == MESSAGES, scenario=7, failure_modes=(53,)),
    case("confirm-lost", scenario=7, failure_modes=(53,)),
    case("relay-killed", scenario=7),
    case("relay-frozen", scenario=7),
    case("relays-at-once", nothing_came_twice),
    case("rolled-back", lambda found: found.plain.ghosts > 0, failure_modes=(54, 55)),
    case("broker-restarted", scenario=7),
    case("forgotten", lambda found: found.plain.doubled == MESSAGES // 2, failure_modes=(56,)),
    case("other-payload", lambda found: found.dead_letters == MESSAGES, failure_modes=(57,)),
    case("poison", lambda found: found.dead_letters == 2, failure_modes=(58,)),
)


@pytest.mark.parametrize(("name", "shows"), CASES)
def test_each_protected_message_has_one_effect(shared: Stage, name: str, shows: Callable[[Verdict], bool]) -> None:
    verdict = run(shared, name, MESSAGES)

    assert verdict.passed, str(verdict)
    # Said once more, where a reader of the test looks for it.
    assert (verdict.kept.doubled, verdict.kept.lost, verdict.kept.ghosts) == (0, 0, 0)
    assert verdict.struck > 0
    assert shows(verdict), str(verdict)


def test_every_fault_has_a_test() -> None:
    assert {case.values[0] for case in CASES} == set(FAULTS)


def test_the_broker_is_the_one_that_was_asked_for(shared: Stage) -> None:
    assert type(shared.broker).__name__.lower().startswith(BROKER[:5])


# Does the harness see anything? It must fail where a message loses its identity, and where one is never sent.


@pytest.mark.parametrize(
    ("fault", "sender", "seen"),
    [("relay-killed", names.WITHOUT_IDENTITY, "doubled"), ("relays-at-once", names.MOST, "lost")],
)
def test_a_message_without_identity_or_one_never_sent_is_seen(
    shared: Stage, fault: str, sender: str, seen: str
) -> None:
    verdict = run(shared, fault, MESSAGES, sender=sender)

    assert getattr(verdict.kept, seen) > 0
    assert not verdict.passed
