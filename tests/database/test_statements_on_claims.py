"""What the statements on claims read, and what they leave behind in a transaction that is not theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection

from idempotency import PARK, Operation, claim, current_claim
from idempotency.identity.fingerprint import Payload
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.backlog import purge_sent_once
from idempotency.outbox.relay import relay_once
from idempotency.outcome import Outcome
from idempotency.protocol import claims
from idempotency.protocol.ownership import Ownership
from idempotency.protocol.renewal import renew
from idempotency.protocol.transactions import own_transaction
from idempotency.upkeep.counters import counters
from idempotency.upkeep.retention import purge_once
from idempotency.upkeep.sweep import recover_once
from tests.database.plans import fill, most_rows_read
from tests.records import HOUR, from_now, make_records

pytestmark = pytest.mark.postgres

OUTCOME = Outcome(201, (), "{}")
BOUNDS = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "synchronous_commit")

plain = Operation("tests.statements.plain")
parks = Operation("tests.statements.parks", transaction=False, recovery=PARK)


def acquire(key: str = "k") -> Ownership:
    held = claims.acquire(parks, Scope("1", parks.name, key), Payload("x"))
    assert isinstance(held, Ownership)
    return held


def take_over(owned: Ownership) -> object:
    IdempotencyRecord.objects.filter(pk=owned.record_id).update(lease_expires_at=from_now(-HOUR))
    return claims.take_over_abandoned(parks, IdempotencyRecord.objects.get(pk=owned.record_id), "default")


@pytest.mark.failure_mode(67)
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "change",
    [lambda owned: claims.record(owned, OUTCOME), claims.release, claims.park, renew, take_over],
    ids=["complete", "release", "park", "renew", "take over"],
)
def test_a_fenced_change_reads_its_own_record_and_no_other_claim(change: Callable[[Ownership], object]) -> None:
    """Not even where the planner believes that nothing is in progress, and its index of that empty."""
    fill(2000)
    owned = acquire()
    make_records(500, Status.IN_PROGRESS, expires=HOUR, lease=HOUR)
    assert most_rows_read(lambda: change(owned)) == 1


@pytest.mark.django_db(transaction=True)
def test_a_claim_that_is_interrupted_leaves_a_connection_that_works() -> None:
    def interrupted() -> None:
        with own_transaction("default", "A claim", one_statement=True):
            connection.connection.pgconn.send_query(b"SELECT 1")  # its answer is never read
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(acquire(), Ownership)
    assert connection.get_autocommit()


@pytest.mark.django_db(transaction=True)
def test_an_error_in_a_transaction_is_not_taken_for_an_open_one() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), own_transaction("default", "A claim"):
        raise RuntimeError("on purpose")


@pytest.mark.failure_mode(59)
@pytest.mark.django_db
def test_nothing_is_left_in_force_in_the_transaction_of_a_test() -> None:
    """It goes on for as long as the test does, and a pause of some seconds would end its connection."""
    before = bounds()
    with claim(plain, account_id="1", key="k") as run:
        run.result = 1
    with claim(plain, account_id="1", key="k") as run:
        assert run.replayed
    with claim(parks, account_id="1", key="k") as run:
        held = current_claim()
        assert held is not None
        held.step("a", lambda: 1)
        held.renew()
    take_over(acquire("taken"))
    claims.release(acquire("released"))
    claims.park(acquire("parked"))
    purge_once()
    purge_sent_once()
    recover_once()
    relay_once()
    counters.flush()
    assert bounds() == before


def bounds() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'current_setting({name!r})' for name in BOUNDS)}")
        return list(cursor.fetchone())
