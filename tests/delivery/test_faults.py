"""Every fault of delivery, once and with few messages. ``python -m tools.deliveries`` runs them in full.

They run on PostgreSQL only. These processes write constantly, so on SQLite they would wait for its only write lock and
test nothing about delivery. ``tests/contrib`` and ``tests/database`` test the inbox and the outbox on SQLite.
"""

import pytest

from tests.delivery import names
from tests.delivery.conftest import BROKER
from tests.delivery.faults import FAULTS, run

pytestmark = pytest.mark.postgres

MESSAGES = 20

#: The scenario and failure of messages that are delivered twice.
DELIVERED_TWICE = (pytest.mark.scenario_7, pytest.mark.failure_53)
#: The scenarios and failures of each fault.
MARKS = {
    **dict.fromkeys(("child-killed", "main-killed", "group-killed", "after-commit"), DELIVERED_TWICE),
    **dict.fromkeys(("redelivered", "published-twice", "confirm-lost"), DELIVERED_TWICE),
    **dict.fromkeys(("relay-killed", "relay-frozen", "broker-restarted"), (pytest.mark.scenario_7,)),
    "rolled-back": (pytest.mark.failure_54, pytest.mark.failure_55),
    "forgotten": (pytest.mark.failure_56,),
    "other-payload": (pytest.mark.failure_57,),
    "poison": (pytest.mark.failure_58,),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in FAULTS])
def test_each_protected_message_has_one_effect(shared, name):
    verdict = run(shared, name, MESSAGES)
    assert verdict.passed, str(verdict)


def test_the_broker_is_the_requested_one(shared):
    assert type(shared.broker).__name__.lower().startswith(BROKER[:5])


# The harness must detect a message that loses its identity, and one that is never sent.


@pytest.mark.parametrize(
    ("fault", "sender", "seen"),
    [("relay-killed", names.WITHOUT_IDENTITY, "doubled"), ("relays-at-once", names.MOST, "lost")],
)
def test_a_message_without_identity_or_never_sent_is_detected(shared, fault, sender, seen):
    verdict = run(shared, fault, MESSAGES, sender=sender)

    assert getattr(verdict.kept, seen) > 0
    assert not verdict.passed
