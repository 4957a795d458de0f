"""The purge, beside transactions that hold its records or the whole table, and under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from django.db import OperationalError, connection, transaction

from idempotency import REEXECUTE, Operation
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.operate.batches import BatchResult
from idempotency.operate.purge import purge_batches, purge_once
from idempotency.operate.sweep import recover_batches
from idempotency.outbox.relay import relay_batches
from idempotency.protocol import claims
from idempotency.protocol.ownership import Ownership
from idempotency.store import store_for
from tests.aliases import reconnected
from tests.concurrency.racing import PATIENCE, elsewhere, is_waited_for, race
from tests.database.claiming import OUTCOME, PAYLOAD, acquire
from tests.database.statements import before_statement, execute
from tests.outbox import broker, make_messages
from tests.providers import eventually
from tests.records import HOUR, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.postgres
def test_a_refusal_of_the_server_ends_the_purge() -> None:
    kept = make_records(3)
    with (
        before_statement("DELETE FROM", lambda: execute("SELECT pg_cancel_backend(pg_backend_pid())")),
        pytest.raises(OperationalError, match="canceling statement"),
    ):
        purge_once()
    assert remaining() == {*kept}


@pytest.mark.postgres
def test_a_lock_of_the_whole_table_is_waited_for() -> None:
    """As when an index is built. The batch has locked nothing meanwhile."""
    make_records(3)
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            execute("LOCK TABLE idempotency_record IN SHARE MODE")
            batch = pool.submit(elsewhere, purge_once)
            assert eventually(is_waited_for)
        assert batch.result(PATIENCE).deleted == 3


swept = Operation("tests.purge.swept", recovery=REEXECUTE)
claimed_meanwhile = Operation("tests.purge.claimed")


@contextmanager
def at_level(level: str) -> Iterator[None]:
    if connection.vendor != "postgresql":
        yield
        return
    from psycopg import IsolationLevel

    with reconnected(isolation_level=IsolationLevel[level]):
        yield


@pytest.mark.scenario_27
@pytest.mark.failure_16
@pytest.mark.failure_30
@pytest.mark.parametrize(
    "level",
    [
        "READ_COMMITTED",
        *(pytest.param(level, marks=pytest.mark.postgres) for level in ("REPEATABLE_READ", "SERIALIZABLE")),
    ],
)
def test_purges_sweeps_relays_and_claims_at_once_end_and_no_claim_is_lost(level: str) -> None:
    """Nor does a claim wait for the others long enough to be turned away, which would raise here."""
    broker.reset()
    live: list[int] = []
    abandoned: list[int] = []
    for account in "abcdefghij":  # on a cluster they are in several shards
        make_records(30, account_id=account)
        live += make_records(2, Status.IN_PROGRESS, lease=HOUR, expires=-HOUR, account_id=account)
        abandoned += make_records(
            6, Status.IN_PROGRESS, lease=-HOUR, expires=HOUR, operation=swept.name, account_id=account
        )
    make_messages(60)
    keys = [f"again-{number}" for number in range(40)]
    for key in keys[::2]:  # their retention is over, all the same to their claimants
        make_records(1, operation=claimed_meanwhile.name, idempotency_key=key, request_hash=PAYLOAD.request_hash)

    def again_and_again(take: Callable[[], Iterator[BatchResult]]) -> None:
        """Until nothing is due. The database may refuse a batch because of the others."""
        while True:
            try:
                for _ in take():
                    pass
                return
            except OperationalError as error:
                if not store_for("default").is_busy(error):
                    raise

    def claim_all(keys: list[str]) -> None:
        for number, key in enumerate(keys):
            owned = acquire(claimed_meanwhile, key)
            assert isinstance(owned, Ownership), f"{key} was answered from a record past retention"
            if number % 4 < 2:
                claims.record(owned, OUTCOME)
            (completed if number % 4 < 2 else open_claims).add(owned.fence.id)

    kinds: list[Callable[[], Iterator[BatchResult]]] = [
        lambda: purge_batches(batch_size=7),
        lambda: recover_batches(batch_size=5),
        lambda: relay_batches(batch_size=5),
    ]
    completed: set[int] = set()
    open_claims: set[int] = set()
    claimants = [partial(claim_all, keys[:20]), partial(claim_all, keys[20:])]
    with at_level(level):
        race([*claimants, *(partial(again_and_again, kind) for kind in kinds * 2)])
        again_and_again(kinds[0])
    assert len(completed) == len(open_claims) == 20
    assert remaining() == {*live, *abandoned} | completed | open_claims
    assert {*IdempotencyRecord.objects.in_progress().values_list("pk", flat=True)} == {*live} | open_claims
    assert {*IdempotencyRecord.objects.completed().values_list("pk", flat=True)} == completed
    assert len(broker.payloads) == 60
