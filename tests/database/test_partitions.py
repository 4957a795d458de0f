"""Tables partitioned by account with the documented SQL: nothing is lost, and a request reads one partition."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_batches, purge_body_batches
from tests.concurrency.traces import rows
from tests.database.claiming import send_every_statement
from tests.database.statements import explaining, fill, relations_read
from tests.partitions import partition
from tests.records import HOUR, make_bodies, make_records

pytestmark = [pytest.mark.django_db, pytest.mark.postgres, pytest.mark.whole_table]

SCOPE = Scope("acme", "tests.partitions", "key")
PARTITIONS = "SELECT count(DISTINCT tableoid) FROM idempotency_record"


@pytest.fixture
def partitioned():
    """Partition the tables. The test's rollback undoes it."""
    partition(4)


def described(table):
    """A table's columns, indexes and constraints, without the wider primary key."""
    queries = {
        "columns": "SELECT (attname, atttypid::regtype, attnotnull, attcollation)::text FROM pg_attribute "
        "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
        "defaults": "SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = %s::regclass",
        "identity": "SELECT attidentity::text FROM pg_attribute WHERE attrelid = %s::regclass AND attname = 'id'",
        "indexes": "SELECT replace(pg_get_indexdef(indexrelid), ' ONLY ', ' ') FROM pg_index "
        "WHERE indrelid = %s::regclass",
        "constraints": "SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = %s::regclass",
    }
    return {
        name: {value and value.replace("(id, account_id)", "(id)") for (value,) in rows(query, table)}
        for name, query in queries.items()
    }


def test_partitioning_keeps_rows_columns_indexes_and_constraints():
    ids = make_records(20, account_id="acme") + make_records(20, Status.PARKED)
    IdempotencyStep.objects.create(account_id="acme", record_id=ids[0], name="charge", result="1")
    tables = ("idempotency_record", "idempotency_step")
    before = [described(table) for table in tables]
    records = list(IdempotencyRecord.objects.order_by("id").values())
    partition(4)
    assert [described(table) for table in tables] == before
    assert list(IdempotencyRecord.objects.order_by("id").values()) == records
    assert min(make_records(5)) > max(ids)
    assert rows(PARTITIONS) == [(2,)]  # the two accounts happen to be in two partitions


@pytest.mark.usefixtures("partitioned")
def test_each_statement_of_an_operation_reads_one_partition():
    for account in range(64):
        make_records(1, account_id=f"account-{account}")
    with CaptureQueriesContext(connection) as captured:
        send_every_statement(SCOPE)
        IdempotencyStep.objects.filter(account_id=SCOPE.account_id, record_id=1).delete()
    read = [relations_read(one["sql"]) for one in captured]
    assert [len(relations) for relations in read[1:]] == [1] * (len(read) - 1), read


def in_every_partition(make, **fields):
    """Rows of 16 accounts, one of each in turn, the oldest first."""
    made = [make(1, account_id=f"account-{n}", **{one: of(n) for one, of in fields.items()})[0] for n in range(16)]
    for n, pk in enumerate(made):
        IdempotencyStep.objects.create(account_id=f"account-{n}", record_id=pk, name="charge", result="1")
    return made


@pytest.mark.usefixtures("partitioned")
@pytest.mark.parametrize(
    ("make", "due", "batches", "left"),
    [
        (make_records, {"expires": lambda n: (n - 100) * HOUR}, purge_batches, {}),
        (make_bodies, {"due": lambda n: (100 - n) * HOUR}, purge_body_batches, {"body_expires_at__isnull": False}),
    ],
    ids=["records", "bodies"],
)
def test_a_bounded_purge_takes_the_oldest_of_all_partitions(make, due, batches, left):
    """A purge that falls behind would otherwise never reach the last partition."""
    kept = in_every_partition(make_records, expires=lambda n: HOUR) if make is make_records else []
    made = in_every_partition(make, **due)
    assert rows(PARTITIONS) == [(4,)]

    def remaining():
        return {*IdempotencyRecord.objects.filter(**left).values_list("pk", flat=True)}

    assert next(batches(batch_size=3)).deleted == 3
    assert remaining() == {*kept, *made[3:]}
    assert [batch.deleted for batch in batches(batch_size=5)] == [5, 5, 3]
    assert remaining() == {*kept} == {*IdempotencyStep.objects.values_list("record_id", flat=True)}


@pytest.mark.usefixtures("partitioned")
def test_a_purge_merges_the_indexes_of_the_partitions():
    fill(5_000)
    in_every_partition(make_records)
    with explaining("SKIP LOCKED") as plans:
        assert next(purge_batches(batch_size=5)).deleted == 5
    (plan,) = plans
    assert "Merge Append" in plan
    assert plan.count("expires_at_idx") == 4
    assert "Seq Scan on idempotency_record" not in plan
