"""Every fault of delivery, once and with few messages. ``python -m tools.deliveries`` runs them in full.

On PostgreSQL only: these processes write all the time, and on SQLite they would wait for its one write lock and show
nothing of delivery. What an inbox and an outbox do on SQLite is tested in ``tests/contrib`` and ``tests/database``.
"""

import pytest

from tests.delivery import names
from tests.delivery.conftest import BROKER
from tests.delivery.faults import FAULTS, run

pytestmark = pytest.mark.postgres

MESSAGES = 20


def case(name, shows=lambda verdict: verdict.plain.doubled > 0, marks=()):
    """A fault, what must have been seen besides, and which scenario and failures it is about."""
    return pytest.param(name, shows, marks=marks, id=name)


def nothing_came_twice(verdict):
    return (verdict.kept.deliveries, verdict.plain.deliveries) == (MESSAGES, MESSAGES)


#: What a message that comes again must not do.
DELIVERED_TWICE = [pytest.mark.scenario_7, pytest.mark.failure_53]

CASES = (
    case("child-killed", marks=DELIVERED_TWICE),
    case("main-killed", marks=DELIVERED_TWICE),
    case("group-killed", marks=DELIVERED_TWICE),
    case("after-commit", marks=DELIVERED_TWICE),
    case("redelivered", marks=DELIVERED_TWICE),
    case("published-twice", lambda found: found.plain.doubled == MESSAGES, marks=DELIVERED_TWICE),
    case("confirm-lost", marks=DELIVERED_TWICE),
    case("relay-killed", marks=[pytest.mark.scenario_7]),
    case("relay-frozen", marks=[pytest.mark.scenario_7]),
    case("relays-at-once", nothing_came_twice),
    case("rolled-back", lambda found: found.plain.ghosts > 0, marks=[pytest.mark.failure_54, pytest.mark.failure_55]),
    case("broker-restarted", marks=[pytest.mark.scenario_7]),
    case("forgotten", lambda found: found.plain.doubled == MESSAGES // 2, marks=[pytest.mark.failure_56]),
    case("other-payload", lambda found: found.dead_letters == MESSAGES, marks=[pytest.mark.failure_57]),
    case("poison", lambda found: found.dead_letters == 2, marks=[pytest.mark.failure_58]),
)


@pytest.mark.parametrize(("name", "shows"), CASES)
def test_each_protected_message_has_one_effect(shared, name, shows):
    verdict = run(shared, name, MESSAGES)

    assert verdict.passed, str(verdict)
    # Said once more, where a reader of the test looks for it.
    assert (verdict.kept.doubled, verdict.kept.lost, verdict.kept.ghosts) == (0, 0, 0)
    assert verdict.struck > 0
    assert shows(verdict), str(verdict)


def test_every_fault_has_a_test():
    assert {case.values[0] for case in CASES} == set(FAULTS)


def test_the_broker_is_the_one_that_was_asked_for(shared):
    assert type(shared.broker).__name__.lower().startswith(BROKER[:5])


# Does the harness see anything? It must fail where a message loses its identity, and where one is never sent.


@pytest.mark.parametrize(
    ("fault", "sender", "seen"),
    [("relay-killed", names.WITHOUT_IDENTITY, "doubled"), ("relays-at-once", names.MOST, "lost")],
)
def test_a_message_without_identity_or_one_never_sent_is_seen(shared, fault, sender, seen):
    verdict = run(shared, fault, MESSAGES, sender=sender)

    assert getattr(verdict.kept, seen) > 0
    assert not verdict.passed
