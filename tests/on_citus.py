"""Tests for Citus only. ``python -m tools.citus … checks`` runs this file, and nothing else collects it."""

import re
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from django.db import IntegrityError, NotSupportedError, OperationalError, connection, transaction

from idempotency import REEXECUTE, Operation, claim, require_claim
from idempotency.checks import check_databases
from idempotency.contrib.dashboard.counting import counters
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.exceptions import UnavailableError
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.erasure import erase_batches, find_rows
from idempotency.operate.purge import purge_batches
from idempotency.operate.statistics import stats
from idempotency.operate.sweep import recover_batches
from idempotency.outbox import publish
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.outbox.relay import relay_once
from idempotency.outbox.upkeep import purge_sent_batches
from idempotency.store import upkeep_for
from testproject.celery import app
from testproject.models import UnprotectedReceipt
from tests.aliases import at_level
from tests.concurrency.racing import elsewhere
from tests.contrib.consumers import send
from tests.database.claiming import send_every_statement
from tests.docs.pages import blocks
from tests.harness.citus import host_of
from tests.harness.postgres import Server
from tests.harness.world import migrate, own_database
from tests.outbox import SENDER, broker, make_messages
from tests.partitions import partition
from tests.records import HOUR, make_records, remaining

pytestmark = pytest.mark.django_db(transaction=True)

SHARDS = 32  # Citus's default

swept = Operation.declare("scale.swept", recovery=REEXECUTE)
stepped = Operation.declare("scale.stepped", transaction=False, recovery=REEXECUTE)
publishing = Operation.declare("scale.publishing")
counted = Operation.declare("scale.counted")


class Planned(NamedTuple):
    statement: str
    #: The number of shards that Citus sends it to; 0 if it reads only the catalogue.
    tasks: int


def planned(call):
    """The plans of the statements that ``call`` executes on the package's tables."""
    found = []

    def explain(execute, statement, parameters, many, context):
        alone = statement.rpartition("END $$; ")[2]
        if re.search("idempotency_(record|step|outbox)", alone):
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN {alone}", parameters)
                plan = "\n".join(line for (line,) in cursor.fetchall())
            assert "Distributed Subplan" not in plan
            found.append(Planned(alone, sum(map(int, re.findall(r"Task Count: (\d+)", plan)))))
        return execute(statement, parameters, many, context)

    with connection.execute_wrapper(explain):
        call()
    return found


def every_change_of_a_record():
    with transaction.atomic():
        send_every_statement(Scope("acme", "scale.tasks", "key"))


def an_operation_and_its_replay():
    for attempt in range(2):
        with claim(stepped.name, account_id="acme", key="steps", payload=1) as run:
            assert run.replayed == bool(attempt)
            if not run.replayed:
                run.result = require_claim().step("one", lambda: 1)
                require_claim().renew()


def a_message_and_its_relay():
    broker.reset()
    with claim(publishing.name, account_id="acme", key="messages", payload=1) as run:
        publish("orders.placed", 1, sender=SENDER)
        publish("orders.placed", 2, sender=SENDER)
        run.result = None
    assert relay_once().sent == 2
    assert broker.payloads == [1, 2]


def a_message_that_is_delivered_twice():
    first, second = (send.apply_async(["label"], task_id="message").get() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("call", "tables"),
    [
        (every_change_of_a_record, {"record"}),
        (an_operation_and_its_replay, {"record", "step"}),
        (a_message_and_its_relay, {"record", "outbox_message"}),
        (a_message_that_is_delivered_twice, {"record"}),
    ],
)
def test_each_statement_of_a_request_a_relay_and_an_inbox_is_one_task(call, tables, settings):
    app.set_current()
    settings.CELERY_TASK_ALWAYS_EAGER = True
    plans = planned(call)
    assert {table for plan in plans for table in re.findall(r"idempotency_(\w+)", plan.statement)} >= tables
    assert [plan for plan in plans if plan.tasks != 1] == []


def test_a_sweep_locks_one_shard_at_a_time():
    fill(40, status=Status.IN_PROGRESS, lease=-HOUR, operation=swept.name)
    plans = planned(lambda: next(recover_batches()))
    locks = [plan.tasks for plan in plans if "FOR UPDATE" in plan.statement]
    assert locks == [1] * len(locks)
    assert [plan.tasks for plan in plans if plan.statement.startswith("UPDATE")] == [SHARDS]
    assert {plan.tasks for plan in plans if plan.statement.startswith("SELECT")} == {1, SHARDS}


def test_a_bounded_purge_takes_the_oldest_records_one_shard_at_a_time():
    newest = fill(20)
    fill(20, expires=-2 * HOUR)
    plans = planned(lambda: next(purge_batches(batch_size=20)))
    assert remaining() == {*newest}
    locks = [plan.tasks for plan in plans if "FOR UPDATE" in plan.statement]
    assert locks == [1] * len(locks)
    make_messages(3, MessageStatus.SENT, sent=-timedelta(days=9))
    assert {plan.tasks for plan in planned(lambda: next(purge_sent_batches()))} == {1}
    assert not OutboxMessage.objects.exists()


@contextmanager
def messages_to_workers():
    """Yield a list of the coordinator's messages to workers: the server, and the message's first word."""
    sent = []

    def note(diagnostic):
        if issued := re.match(r"issuing (\w+)", diagnostic.message_primary or ""):
            sent.append((diagnostic.message_detail.partition("connectionId")[0], issued[1]))

    with connection.cursor() as cursor:
        cursor.execute("SET citus.log_remote_commands TO on")
        driver = connection.connection
        driver.add_notice_handler(note)
        try:
            yield sent
        finally:
            driver.remove_notice_handler(note)
            cursor.execute("RESET citus.log_remote_commands")


#: The setting sent with the claim needs a transaction on the worker.
CLAIM = ["BEGIN", "INSERT", "COMMIT"]


def test_a_request_sends_few_messages_to_one_worker():
    def call(key, *, effect=False):
        with claim(counted.name, account_id="acme", key=key, payload=1) as run:
            if not run.replayed:
                run.result = None
                if effect:
                    UnprotectedReceipt.objects.create(label="on the coordinator", amount=1)

    call("before", effect=True)  # connects to the worker
    for make, expected in (
        (partial(call, "one"), [*CLAIM, "BEGIN", "UPDATE", "COMMIT"]),
        (partial(call, "one"), [*CLAIM, "SELECT"]),
        (partial(call, "two", effect=True), [*CLAIM, "BEGIN", "UPDATE", "PREPARE", "COMMIT"]),
    ):
        with messages_to_workers() as sent:
            make()
        assert [verb for _, verb in sent] == expected
        assert len({server for server, _ in sent}) == 1


ACCOUNTS_BY_WORKER = """
SELECT min(account)
FROM unnest(%s::text[]) AS account
JOIN pg_dist_shard_placement
    ON shardid = get_shard_id_for_distribution_column('idempotency_record'::regclass, account)
GROUP BY nodename
ORDER BY nodename = %s
"""


def accounts_by_worker(cluster):
    """An account of the second worker, and one of the first."""
    with connection.cursor() as cursor:
        cursor.execute(ACCOUNTS_BY_WORKER, [list("abcdefgh"), host_of(cluster.workers[0])])
        (other,), (first,) = cursor.fetchall()
    return other, first


@pytest.mark.parametrize("workers", [1, 2])
def test_a_race_that_is_lost_at_serializable_is_unavailable_and_the_retry_finds_out(cluster, workers):
    account, other = accounts_by_worker(cluster)
    rows = {1: account, 2: other}[workers]

    def add(name):
        """Neither of two at once can follow the other: each counts, and adds what the other has not counted."""
        with transaction.atomic():
            counted_before = IdempotencyStep.objects.filter(account_id=rows).count()
            IdempotencyStep.objects.create(account_id=rows, record_id=1, name=name, result=str(counted_before))

    def call(meanwhile=lambda: None):
        with claim(counted.name, account_id=account, key="key", payload=1) as run:
            if not run.replayed:
                add("mine")
                meanwhile()
                run.result = None
        return run.replayed

    with at_level("SERIALIZABLE"):
        with pytest.raises(UnavailableError):
            call(meanwhile=partial(elsewhere, partial(add, "theirs")))
        assert [call(), call()] == [False, True]
    assert {*IdempotencyStep.objects.values_list("name", "result")} == {("theirs", "0"), ("mine", "1")}


def test_without_a_worker_other_accounts_work_and_events_are_counted_later(cluster):
    served, refused = accounts_by_worker(cluster)

    def call(account_id):
        with claim(counted.name, account_id=account_id, key="key", payload=1) as run:
            if not run.replayed:
                run.result = None
        return run.replayed

    def replays():
        counters.flush()
        totals = IdempotencyCounter.objects.filter(operation=counted.name, hour=0, event="replayed")
        return sum(totals.values_list("total", flat=True))

    before = replays()
    worker = Server(cluster.workers[0])
    worker.run("pg_ctl", "--mode", "immediate", "stop")
    try:
        with pytest.raises(UnavailableError):
            call(refused)
        for upkeep in (lambda: next(recover_batches()), lambda: next(purge_batches())):
            with pytest.raises(OperationalError):
                upkeep()
        assert [call(served), call(served)] == [False, True]
        assert replays() == before  # the counts are kept, because each server has a copy of the table
    finally:
        worker.start()
        connection.close()  # the coordinator's session has connections to the stopped worker
    assert replays() == before + 1
    assert [call(refused), call(refused)] == [False, True]


def fill(count, **options):
    """Insert records of many accounts, so in all shards."""
    return [make_records(1, account_id=f"account-{number}", **options)[0] for number in range(count)]


def test_the_statistics_cover_all_shards():
    fill(300)
    numbers = stats()
    assert numbers.records.value == 300
    assert numbers.table_bytes.value is not None
    assert numbers.table_bytes.value > 32 * 8192
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE idempotency_record")
    assert upkeep_for("default").measure().records == 300
    with transaction.atomic():
        IdempotencyRecord.objects.update(attempt=2)
        assert stats().table_bytes.value is not None  # also in a transaction that has written to all shards


#: A project's tables, which the page's examples register with Citus.
ACCOUNT = 'account_id varchar(255) COLLATE "C" NOT NULL'
SHOP = [
    "CREATE TABLE shop_currency (code text PRIMARY KEY)",
    f"CREATE TABLE shop_order (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, {ACCOUNT})",
    f"CREATE TABLE shop_line (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, order_id bigint, {ACCOUNT})",
    "CREATE TABLE shop_owner (id bigserial PRIMARY KEY)",
    "CREATE TABLE shop_setting (id bigserial PRIMARY KEY, owner_id bigint REFERENCES shop_owner)",
]
PAGE = "how-to/distribute-over-citus.md"
PACKAGE = {"idempotency_dashboard_counter", "idempotency_outbox_message", "idempotency_record", "idempotency_step"}
KNOWN = "SELECT logicalrelid::text FROM pg_dist_partition WHERE logicalrelid::text !~ '_p\\d+$'"


@pytest.fixture
def ordinary(cluster):
    """Connect the test to a database of the cluster with ordinary tables, as ``migrate`` creates them."""
    original = connection.settings_dict["NAME"]
    with own_database(cluster.coordinator) as url:
        cluster.spread(url)
        migrate(url)
        connection.close()
        connection.settings_dict["NAME"] = urlsplit(url).path[1:]
        yield
        connection.close()
        connection.settings_dict["NAME"] = original


def execute(statements):
    with connection.cursor() as cursor:
        cursor.execute(statements)


def known_tables():
    with connection.cursor() as cursor:
        cursor.execute(KNOWN)
        return {table for (table,) in cursor.fetchall()}


def unknown_tables():
    """The tables that the system check reports."""
    return " ".join(str(message.msg).partition(". ")[0] for message in check_databases(None, databases=["default"]))


@pytest.mark.parametrize("partitioned", [False, True])
def test_the_page_distributes_ordinary_tables_and_keeps_their_rows(ordinary, partitioned):
    def operate(key):
        with claim(stepped.name, account_id="acme", key=key, payload=1) as run:
            if not run.replayed:
                run.result = require_claim().step("one", lambda: key)
        return run.replayed

    if partitioned:
        partition(4)
    kept = fill(20, expires=HOUR)
    assert not operate("before")
    assert re.findall(r"idempotency_\w+", unknown_tables()) == sorted(PACKAGE)

    (statements,) = blocks(PAGE, "postgresql")
    _cluster, registered, distributed = blocks(PAGE, "sql")
    for statement in (statements, *SHOP, *registered.splitlines()):
        execute(statement)
    with pytest.raises(NotSupportedError, match="cannot create constraint"):
        execute("SELECT create_distributed_table('shop_order', 'account_id')")
    for statement in distributed.splitlines():
        execute(statement)
    assert known_tables() == PACKAGE | {
        *("shop_currency", "shop_line", "shop_order", "shop_owner", "shop_setting"),
    }
    execute("INSERT INTO shop_order VALUES (DEFAULT, 'acme')")
    execute("INSERT INTO shop_line (order_id, account_id) SELECT id, account_id FROM shop_order")
    with pytest.raises(IntegrityError):
        execute("INSERT INTO shop_line (order_id, account_id) VALUES (1, 'another')")
    assert "idempotency_" not in unknown_tables()
    while left := re.findall(r"(?:auth|django|testproject)_\w+|authtoken_token", unknown_tables()):
        execute(f"SELECT citus_add_local_table_to_metadata('{left[0]}', cascade_via_foreign_keys => true)")
    assert check_databases(None, databases=["default"]) == []

    assert [operate("before"), operate("after"), operate("after")] == [True, False, True]
    assert remaining() > {*kept}
    assert max(remaining()) > max(kept)
    assert IdempotencyStep.objects.count() == 2
    fill(30)
    assert next(purge_batches()).deleted == 30
    assert (upkeep_for("default").measure().in_bytes or 0) > SHARDS * 8192
    assert {plan.tasks for plan in planned(partial(operate, "again"))} == {1}


def test_a_claim_names_no_session():
    """The workers, which change the record, don't list the coordinator's sessions."""
    with claim(counted.name, account_id="acme", key="session", payload=1) as run:
        assert IdempotencyRecord.objects.get().session is None
        run.result = None


def test_a_row_is_saved_without_its_account():
    fill(1)
    record = IdempotencyRecord.objects.get()
    with pytest.raises(NotSupportedError, match="partition value"):
        record.save()
    record.save(update_fields=["error"])


def test_an_erasure_deletes_an_account_with_its_steps():
    an_operation_and_its_replay()
    kept = fill(20)
    (batch,) = [batch for batch in erase_batches(find_rows("acme")) if batch.touched]
    assert (batch.records, IdempotencyStep.objects.count(), remaining()) == (1, 0, {*kept})


def test_the_other_checks_read_distributed_tables():
    make_records(1, operation="gone.declared", expires=HOUR)
    with transaction.atomic():
        execute("ALTER TABLE idempotency_record DROP COLUMN error")
        found = check_databases(None, databases=["default"])
        transaction.set_rollback(True)
    assert {message.id for message in found} == {f"idempotency.{number}" for number in ("W014", "W027", "E032")}


def test_a_table_unknown_to_citus_is_reported():
    (message,) = check_databases(None, databases=["default"])
    assert message.id == "idempotency.W014"
    assert "django_session" in message.msg
    assert "testproject_transfer" not in message.msg
