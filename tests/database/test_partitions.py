"""``idempotency_partition`` splits the tables by account and loses nothing; each statement then reads one partition."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.outcome import BODY_GONE
from idempotency.sql import Fence, Row, Store, store
from idempotency.upkeep.bodies import purge_body_batches
from idempotency.upkeep.retention import purge_batches, purge_once
from tests.commands import run_command
from tests.database.claiming import OUTCOME
from tests.database.statements import execute, relations_read
from tests.records import HOUR, make_bodies, make_records, remaining

pytestmark = [pytest.mark.django_db, pytest.mark.postgres, pytest.mark.whole_table]

SCOPE = Scope("acme", "tests.partitions", "key")


def partition(*arguments: str, partitions: int = 4) -> list[str]:
    code, lines, _ = run_command("idempotency_partition", f"--partitions={partitions}", *arguments)
    assert code == 0
    return lines


@pytest.fixture
def partitioned() -> None:
    """Until the end of the test, which rolls everything back."""
    assert partition("--verbosity=0") == []


def described(table: str) -> dict[str, set[str]]:
    """A table's columns, indexes, constraints and privileges, without what names its partitions."""
    queries = {
        "columns": "SELECT (attname, atttypid::regtype, attnotnull, attcollation)::text FROM pg_attribute "
        "WHERE attrelid = %s::regclass AND attnum > 0",
        "defaults": "SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = %s::regclass AND adnum > 1",
        "indexes": "SELECT replace(pg_get_indexdef(indexrelid), ' ONLY ', ' ') FROM pg_index "
        "WHERE indrelid = %s::regclass",
        "constraints": "SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = %s::regclass",
        "grants": "SELECT aclexplode(relacl)::text FROM pg_class WHERE oid = %s::regclass",
        "sequence": "SELECT pg_get_serial_sequence(%s, 'id')",
    }
    found: dict[str, set[str]] = {}
    with connection.cursor() as cursor:
        for name, query in queries.items():
            cursor.execute(query, [table])
            found[name] = {value for (value,) in cursor.fetchall()}
    return found


def test_what_the_tables_have_their_partitions_have_too() -> None:
    ids = make_records(20, account_id="acme") + make_records(20, Status.PARKED)
    IdempotencyStep.objects.create(account_id="acme", record_id=ids[0], name="charge", result="1")
    execute("CREATE ROLE tests_application")
    execute("GRANT SELECT, DELETE ON idempotency_record TO tests_application")
    execute("GRANT USAGE ON SEQUENCE idempotency_record_id_seq TO PUBLIC")
    execute("ALTER TABLE idempotency_record SET (fillfactor = 70)")
    tables = ("idempotency_record", "idempotency_step")
    before = [described(table) for table in tables]
    rows = list(IdempotencyRecord.objects.order_by("id").values())
    assert partition("--copy") == ["The tables in database 'default' now have 4 partitions each."]
    assert [described(table) for table in tables] == before
    assert list(IdempotencyRecord.objects.order_by("id").values()) == rows
    assert min(make_records(5)) > max(ids)
    assert {part.records for part in store("default").parts()} == {f"idempotency_record_p{n}" for n in range(4)}
    assert {part.steps for part in store("default").parts()} == {f"idempotency_step_p{n}" for n in range(4)}
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, reloptions, aclexplode(relacl)::text FROM pg_class WHERE relname ~ '_record_p0$'"
        )
        leaf = cursor.fetchall()
    assert {tuple(options) for _, options, _ in leaf} == {("fillfactor=70",)}
    assert {grant for _, _, grant in leaf} == before[0]["grants"]


def test_a_dry_run_prints_what_a_run_executes() -> None:
    lines = partition("--dry-run")
    assert store("default").parts() == Store.parts(store("default"))
    for statement in lines[1:-1]:
        execute(statement)
    assert len(store("default").parts()) == 4


def forget_the_sequence() -> None:
    execute("ALTER TABLE idempotency_step ALTER COLUMN id DROP IDENTITY")


@pytest.mark.parametrize(
    ("given", "arguments", "why"),
    [
        (make_records, {}, "Say --copy to copy them"),
        (lambda: None, {"partitions": 1}, "--partitions must be between 2 and 1024"),
        (lambda: None, {"partitions": 1025}, "--partitions must be between 2 and 1024"),
        (partition, {}, "idempotency_record is partitioned already"),
        (
            lambda: execute(
                "CREATE TRIGGER tests_trigger BEFORE UPDATE ON idempotency_record FOR EACH ROW "
                "EXECUTE FUNCTION suppress_redundant_updates_trigger()"
            ),
            {},
            "its partitions would not have: trigger tests_trigger",
        ),
        (lambda: execute("ALTER TABLE idempotency_step ENABLE ROW LEVEL SECURITY"), {}, "row security"),
        (forget_the_sequence, {}, "idempotency_step has .* an id without a sequence of its own"),
        (
            lambda: execute("CREATE VIEW tests_view AS SELECT id FROM idempotency_record"),
            {},
            "other objects depend on it(.|\n)*Nothing was changed",
        ),
    ],
    ids=["rows", "one", "too many", "again", "trigger", "row security", "sequence", "view"],
)
def test_what_would_be_lost_is_refused(given: Callable[[], object], arguments: dict[str, int], why: str) -> None:
    given()
    with pytest.raises(CommandError, match=why):
        partition(**arguments)


@pytest.mark.usefixtures("partitioned")
def test_each_statement_of_an_operation_reads_one_partition() -> None:
    for account in range(64):
        make_records(1, account_id=f"account-{account}")
    statements = store("default")

    def observed() -> Row:
        row = statements.read(SCOPE)
        assert row is not None
        return row

    def fence() -> Fence:
        row = observed()
        return Fence(SCOPE, row.id, row.attempt, row.request_hash)

    lease, ttl = timedelta(seconds=-1), timedelta(hours=1)
    with CaptureQueriesContext(connection) as captured:
        assert statements.insert_claim(SCOPE, "v1:1", lease=lease, ttl=ttl, wait_for_disk=True)
        assert statements.take_over(SCOPE, observed(), lease=lease, ttl=ttl)
        assert statements.set_lease(fence(), lease, ttl=ttl)
        assert statements.park_abandoned(SCOPE, observed())
        assert not statements.release(fence())
        assert not statements.park(fence())
        assert not statements.complete(fence(), OUTCOME, ttl=ttl)
        assert not statements.start_over(SCOPE, observed(), "v1:2", lease=lease, ttl=ttl)
        IdempotencyStep.objects.filter(account_id=SCOPE.account_id, record_id=1).delete()
    read = [relations_read(one["sql"]) for one in captured]
    assert [len(relations) for relations in read[1:]] == [1] * (len(read) - 1), read


@pytest.mark.usefixtures("partitioned")
def test_a_purge_takes_one_partition_after_the_other() -> None:
    kept = [make_records(1, account_id=f"account-{n}", expires=HOUR)[0] for n in range(8)]
    due = [make_records(1, account_id=f"account-{n}")[0] for n in range(8)]
    for pk in [*kept, *due]:
        account = IdempotencyRecord.objects.get(pk=pk).account_id
        IdempotencyStep.objects.create(account_id=account, record_id=pk, name="charge", result="1")
    assert [batch.deleted for batch in purge_batches(batch_size=3)] == [3, 3, 2]
    assert remaining() == {*kept}
    assert {*IdempotencyStep.objects.values_list("record_id", flat=True)} == {*kept}
    make_records(3)
    assert purge_once().deleted == 3


@pytest.mark.usefixtures("partitioned")
def test_a_purge_of_bodies_takes_one_partition_after_the_other() -> None:
    bodies = [make_bodies(1, account_id=f"account-{n}")[0] for n in range(8)]
    for n, pk in enumerate(bodies):
        IdempotencyStep.objects.create(account_id=f"account-{n}", record_id=pk, name="charge", result="1")
    assert [batch.deleted for batch in purge_body_batches(batch_size=3)] == [3, 3, 2]
    assert set(IdempotencyRecord.objects.values_list("response_body", flat=True)) == {BODY_GONE}
    assert not IdempotencyStep.objects.exists()
