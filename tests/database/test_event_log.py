"""The event log: one line for each event, with JSON-serialisable attributes, only if ``LOGGING`` enables it."""

import json
import logging
from uuid import UUID

import pytest

from idempotency import Operation, claim, log, signals
from idempotency.identity.scope import Scope
from idempotency.outbox.models import OutboxMessage
from tests.contrib.conftest import _as_if_off  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("_as_if_off")

SCOPE = Scope("private-account", "tests.log", "private-key")
KEY = "priva… (11 characters)"
OF = {"operation": "tests.log", "attempt": 2, "key": KEY, "trace": SCOPE.trace}
DEAD = {"account_id": "", "idempotency_key": "private-key", "attempt": 16, "message_id": UUID(int=1), "topic": "a"}


@pytest.fixture
def operation():
    return Operation.declare("tests.log")


def extra(record):
    """The attributes that a JSON formatter writes of a record, parsed again."""
    named = {name.removeprefix("idempotency_"): value for name, value in vars(record).items() if "idempotency_" in name}
    return json.loads(json.dumps(named))


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, log.EVENTS)
    log.connect_if_named()
    with caplog.filtering(log.ClaimFilter()):
        yield caplog


def test_each_event_is_one_line_without_the_account_and_the_whole_key(lines, operation):
    signals.send(signals.claimed, operation, SCOPE, 2)
    signals.send(signals.recovered, operation, SCOPE, 2, status="parked")
    signals.send(signals.recovered, None, SCOPE, 2, status="completed")
    signals.purged.send(OutboxMessage, count=3)
    signals.unprotected.send(operation)
    signals.message_dead.send(OutboxMessage, **DEAD)
    empty = {"operation": "", "key": "", "trace": "", "attempt": ""}  # the filter's defaults
    assert [extra(line) for line in lines.records] == [
        {"event": "claimed", **OF},
        {"event": "recovered", "status": "parked", **OF},
        {**empty, "event": "recovered", "attempt": 2, "status": "completed"},
        {**empty, "event": "purged", "count": 3},
        {**empty, "event": "unprotected", "operation": "tests.log"},
        {**empty, "event": "message_dead", "attempt": 16, "message_id": str(UUID(int=1)), "topic": "a"},
    ]
    claimed = f"claimed: operation 'tests.log', key '{KEY}', trace '{SCOPE.trace}', attempt 2"
    assert lines.records[0].getMessage() == claimed
    assert "private" not in str([vars(line) for line in lines.records])


def test_a_line_within_another_claim_keeps_its_own_operation(lines, operation, db):
    with claim("tests.log.outer", account_id="1", key="k") as run:
        signals.send(signals.replayed, operation, SCOPE, 2)
        run.result = None
    [replayed] = [line for line in lines.records if extra(line)["event"] == "replayed"]
    assert extra(replayed) == {"event": "replayed", **OF}


def test_receivers_need_a_level_and_lower_events_are_not_logged(caplog, operation):
    assert log.logger.level == logging.NOTSET
    log.connect_if_named()
    assert not is_connected()
    with caplog.at_level(logging.WARNING, log.EVENTS):
        log.connect_if_named()
        assert is_connected()
        signals.send(signals.claimed, operation, SCOPE, 1)
    assert caplog.records == []


def is_connected():
    return "idempotency.events.claimed" in {key[0] for key, *_ in signals.claimed.receivers}
