"""Behaviour on other databases, simulated by their vendor name or error codes."""

import re
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from unittest.mock import MagicMock, Mock

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError, connections
from django.test.utils import CaptureQueriesContext

from idempotency.contrib.dashboard import counting
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord, Now
from idempotency.store import Fence, Store, Upkeep, postgresql, retry_lost_races, store_for, upkeep_for
from idempotency.store.mysql import MySQLStore, MySQLUpkeep
from idempotency.store.own_connection import LIMIT, open_own_connection
from idempotency.store.portable import SQLiteStore
from idempotency.store.postgresql import PostgreSQLStore, PostgreSQLUpkeep
from idempotency.store.postgresql.merged import PostgreSQLWatch
from tests.concurrency.racing import elsewhere
from tests.database.statements import before_statement

connection = connections["default"]
mysql, portable, sqlite = MySQLStore(connection), Store(connection), SQLiteStore(connection)


@pytest.mark.parametrize(
    ("vendor", "kind", "upkeep"),
    [
        ("postgresql", PostgreSQLStore, PostgreSQLUpkeep),
        ("mysql", MySQLStore, MySQLUpkeep),
        ("sqlite", SQLiteStore, Upkeep),
        ("oracle", Store, Upkeep),
    ],
)
def test_a_database_gets_the_store_and_the_upkeep_of_its_vendor(vendor, kind, upkeep, monkeypatch):
    monkeypatch.setattr(postgresql, "_query_citus", lambda connection: False)
    monkeypatch.setattr(type(connection), "vendor", vendor)
    stores = elsewhere(lambda: [store_for("default") for _ in range(2)])
    assert type(stores[0]) is kind
    assert stores[0] is stores[1]
    assert elsewhere(lambda: type(upkeep_for("default"))) is upkeep


def test_mysql_gets_the_time_in_utc():
    """Its ``CURRENT_TIMESTAMP`` is in the session's zone."""
    compiler = IdempotencyRecord.objects.values_list("pk").query.get_compiler(connection=connection)
    assert Now().as_mysql(compiler, connection)[0] == "UTC_TIMESTAMP(6)"


QUESTIONS = (
    *("is_duplicate", "lost_a_race", "timed_out_waiting", "is_busy", "commit_was_refused", "is_permanent"),
    *("was_broken_before", "was_refused_in_transaction", "was_read_only"),
)


@pytest.mark.parametrize(
    ("store", "error", "expected"),
    [
        (mysql, IntegrityError(1062, "Duplicate entry 'k'"), {"is_duplicate"}),
        (mysql, IntegrityError(1048, "Column 'status' cannot be null"), set()),
        (mysql, OperationalError(1213, "Deadlock found"), {"lost_a_race", "is_busy", "commit_was_refused"}),
        (mysql, OperationalError(1020, "Record has changed"), {"lost_a_race", "is_busy", "commit_was_refused"}),
        (mysql, OperationalError(1205, "Lock wait timeout exceeded"), {"timed_out_waiting", "is_busy"}),
        (mysql, ProgrammingError(1146, "Table 'record' doesn't exist"), {"is_permanent"}),
        (mysql, OperationalError(1054, "Unknown column 'record'"), {"is_permanent"}),
        (mysql, OperationalError(1568, "Transaction is in progress"), {"was_refused_in_transaction"}),
        (mysql, OperationalError(1792, "Cannot execute in a READ ONLY transaction"), {"was_read_only"}),
        (mysql, OperationalError(2006, "Server has gone away"), set()),
        (mysql, OperationalError(), set()),
        (sqlite, IntegrityError("UNIQUE constraint failed: record.account_id"), {"is_duplicate", "commit_was_refused"}),
        (sqlite, IntegrityError("NOT NULL constraint failed: record.later"), {"is_permanent", "commit_was_refused"}),
        (sqlite, IntegrityError("FOREIGN KEY constraint failed"), {"commit_was_refused"}),
        (sqlite, OperationalError("no such table: record"), {"is_permanent"}),
        (sqlite, OperationalError("table record has no column named later"), {"is_permanent"}),
        (sqlite, OperationalError("database is locked"), {"is_busy"}),
        (sqlite, OperationalError("disk I/O error"), set()),
        # For an unknown database, only the class of the error counts.
        (portable, IntegrityError("of any text"), {"is_duplicate", "commit_was_refused"}),
        (portable, ProgrammingError("of any text"), {"is_permanent"}),
        (portable, OperationalError("of any text"), set()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Store) else str(*getattr(value, "args", ())[:1]),
)
def test_the_errors_of_each_database_are_classified(store, error, expected):
    meanings = {question for question in QUESTIONS if getattr(store, question)(error)}
    assert meanings == expected


@pytest.mark.parametrize(
    ("lost", "lost_a_race", "tried"), [(2, True, 3), (3, True, 3), (1, False, 1)], ids=["won", "lost again", "no race"]
)
def test_a_transaction_that_lost_a_race_is_retried_up_to_a_limit(lost, lost_a_race, tried, monkeypatch):
    monkeypatch.setattr(store_for("default"), "lost_a_race", lambda error: lost_a_race and error is refused)
    refused, tries = OperationalError(), count(1)

    def transact():
        if (number := next(tries)) <= lost:
            raise refused
        return number

    with nullcontext() if tried > lost else pytest.raises(OperationalError):
        assert retry_lost_races(3, "default", transact) == tried
    assert next(tries) == tried + 1


@pytest.mark.django_db(transaction=True)
def test_a_claim_opens_a_transaction_if_the_driver_can_not_report_one():
    with portable.own_statement("A claim"):
        assert connection.in_atomic_block
    with sqlite.own_statement("A claim") if connection.vendor == "sqlite" else nullcontext():
        assert not connection.in_atomic_block


@pytest.mark.django_db
def test_a_counter_that_another_process_just_created_is_added_to():
    one = {"hour": 0, "operation": "charges.create", "event": "claimed"}
    counters = IdempotencyCounter.objects.filter(**one)
    create = iter([lambda: IdempotencyCounter.objects.create(**one, total=1)])
    with before_statement("INSERT", lambda: next(create, lambda: None)()):
        counting._add("default", {("charges.create", "claimed"): 2}, 7)
    assert counters.get().total == 3


@pytest.mark.django_db
def test_an_unwatchable_transaction_is_not_reported_as_ended():
    with portable.watch_transaction() as watch:
        watch.look()
    assert (watch.ended, watch.has_committed()) == (False, False)


@pytest.mark.failure_64
@pytest.mark.parametrize(
    ("statement", "may_replace"),
    [
        *((text, True) for text in ("COMMIT AND CHAIN", "Rollback; BEGIN", "abort and /* /* */ */ chain", "END;START")),
        *((text, False) for text in ("COMMIT", "SELECT 1; COMMIT", "ROLLBACK TO s", "SELECT 'a; b'", "SELECT chain")),
        ("SELECT CASE WHEN 1 = 1 THEN 2 END", False),
    ],
)
def test_a_transactions_identity_is_queried_only_if_it_may_change(statement, may_replace):
    """Two round trips more for every other statement would cost too much."""
    identity = Mock(return_value="7")
    watch = PostgreSQLWatch(connection, lambda cursor: False)
    watch._identity, watch.look, watch._begun = identity, lambda: None, True
    execute, context = Mock(), {"connection": connection}
    for _ in range(2):
        assert watch(execute, statement, ["of the caller"], False, context) is execute.return_value
        execute.assert_called_with(statement, ["of the caller"], False, context)
    assert identity.call_count == may_replace


ENDINGS = (
    *("COMMIT", " commit work", "ROLLBACK", "BEGIN", "INSERT INTO t VALUES (1); COMMIT", "SET autocommit = 1"),
    *("START TRANSACTION", "CREATE TABLE t (a INT)", "/* a */ COMMIT", "ROLLBACK /* TO s */", "CALL p()"),
)
OTHERS = (
    *("ROLLBACK /* a */ TO SAVEPOINT s", "ROLLBACK TO SAVEPOINT s /* commit */", "RELEASE SAVEPOINT s"),
    *("ROLLBACK TO SAVEPOINT s", "ROLLBACK WORK TO s", "SAVEPOINT s", "SELECT 'commit'", "(SELECT 1) UNION SELECT 2;"),
    *("INSERT INTO begin VALUES (1)", "/* a */ update t SET commit = 1"),
)


@pytest.mark.failure_64
@pytest.mark.failure_106
@pytest.mark.parametrize(
    ("statement", "is_asked"),
    [(text, True) for text in ENDINGS] + [(text, False) for text in OTHERS],
)
@pytest.mark.parametrize("number", [None, 1305, 2006], ids=["same", "gone", "lost"])
def test_a_savepoint_shows_whether_a_statement_ended_the_transaction(statement, is_asked, number, monkeypatch):
    driver = MagicMock()
    monkeypatch.setattr(connection, "connection", driver)
    send = driver.cursor.return_value.__enter__.return_value.execute
    with mysql.watch_transaction() as watch:
        watch(lambda *arguments: None, statement, None, False, {})
        send.side_effect = None if number is None else connection.Database.OperationalError(number, "refused")
    sent = [each.args[0] for each in send.call_args_list]
    assert sent == ["SAVEPOINT idempotency_watch", "RELEASE SAVEPOINT idempotency_watch"] * is_asked
    assert watch.ended is (is_asked and number == 1305)


@pytest.mark.failure_64
@pytest.mark.parametrize(("number", "ends"), [(1050, True), (1213, False)], ids=["table exists", "deadlock"])
def test_a_failed_statement_may_have_ended_its_transaction(number, ends):
    """After a deadlock there is no savepoint, but nothing was committed."""
    with mysql.watch_transaction() as watch:
        watch._send = Mock(side_effect=[None, OperationalError(1305, "SAVEPOINT does not exist")])
        with pytest.raises(OperationalError):
            watch(Mock(side_effect=OperationalError(number, "")), "CREATE TABLE t (a INT)", None, False, {})
    assert watch.ended is ends


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("mariadb", "begins"), [(True, "SET STATEMENT innodb_lock_wait_timeout = 1 FOR "), (False, "")]
)
def test_claims_on_mariadb_have_a_lock_timeout(mariadb, begins, monkeypatch):
    monkeypatch.setitem(vars(connection), "mysql_is_mariadb", mariadb)
    sent = []
    with mysql.bounded_wait(), connection.execute_wrapper(lambda execute, sql, *rest: sent.append(sql)):
        connection.cursor().execute("INSERT")
    assert sent == [f"{begins}INSERT"]


@pytest.mark.django_db
def test_each_claim_and_its_changes_have_a_lock_timeout_on_mysql(monkeypatch):
    bounded = []
    monkeypatch.setattr(mysql, "bounded_wait", lambda: nullcontext(bounded.append(None)))
    scope, minute = Scope("1", "tests.bounded", "k"), timedelta(minutes=1)
    pk = mysql.insert_claim(scope, "v1:1", lease=minute, retention=minute, undone_by_crash=False)
    assert len(bounded) == 1
    assert mysql.park(Fence(scope, pk, 1, "v1:1"))
    assert len(bounded) == 2


@pytest.mark.django_db
def test_a_claim_on_mysql_commits_itself_except_in_a_test_case(monkeypatch):
    monkeypatch.setattr(mysql, "own_transaction", lambda what: nullcontext())
    driver = Mock()
    monkeypatch.setattr(connection, "connection", driver)
    for savepoints in ([], ["of a test case"]):
        monkeypatch.setattr(connection, "savepoint_ids", savepoints)
        with mysql.own_statement("A claim"):
            driver.autocommit.assert_called_once_with(True)


@pytest.mark.django_db
def test_a_connection_closed_by_mysql_before_a_claim_is_a_django_error(monkeypatch):
    monkeypatch.setattr(mysql, "own_transaction", lambda what: nullcontext())
    monkeypatch.setattr(connection, "savepoint_ids", [])
    monkeypatch.setattr(connection, "connection", Mock())
    connection.connection.autocommit.side_effect = connection.Database.OperationalError
    with pytest.raises(OperationalError), mysql.own_statement("A claim"):
        pass


@pytest.mark.django_db
@pytest.mark.parametrize(("level", "by_id"), [("read committed", True), ("repeatable read", False), (None, False)])
def test_mysql_locks_rows_by_id_unless_a_snapshot_predates_the_locks(level, by_id, monkeypatch):
    monkeypatch.setattr(connection, "isolation_level", level, raising=False)
    for name in "abc":
        IdempotencyCounter.objects.create(operation=name, event="claimed")
    rows = IdempotencyCounter.objects.exclude(operation="b").order_by("-operation").values_list("operation", flat=True)
    upkeep = MySQLUpkeep(mysql)
    with CaptureQueriesContext(connection) as statements:
        assert (upkeep.select_unlocked(rows), upkeep.select_unlocked(rows, 1)) == (["c", "a"], ["c"])
    conditions = [one["sql"].partition(" WHERE ")[2] for one in statements.captured_queries]
    assert ["operation" in condition for condition in conditions] == ([True, False, True] * 2 if by_id else [True] * 2)


@pytest.mark.except_mariadb
@pytest.mark.parametrize(
    ("partial", "columns"), [(True, ["status", "lease_expires_at"]), (False, ["lease_expires_at"])]
)
def test_the_unfinished_index_has_one_column_without_partial_indexes(partial, columns, monkeypatch):
    monkeypatch.setattr(connection.features, "supports_partial_indexes", partial)
    (index,) = (one for one in IdempotencyRecord._meta.indexes if one.name == "idempotency_record_unfinished")
    statement = str(index.create_sql(IdempotencyRecord, connection.schema_editor(collect_sql=True)))
    assert re.findall(r"\w+", statement.partition("(")[2].partition(")")[0]) == columns
    assert ("WHERE" in statement) is partial


@pytest.mark.failure_20
@pytest.mark.parametrize(
    ("vendor", "mariadb", "of_keys", "of_texts"),
    [
        ("postgresql", False, "C", None),
        ("mysql", False, "utf8mb4_0900_bin", "utf8mb4_bin"),
        ("mysql", True, "utf8mb4_nopad_bin", "utf8mb4_bin"),
        ("sqlite", False, None, None),
    ],
)
def test_keys_are_compared_byte_for_byte_and_texts_have_any_characters(vendor, mariadb, of_keys, of_texts, monkeypatch):
    monkeypatch.setattr(connection, "vendor", vendor)
    monkeypatch.setattr(connection, "mysql_is_mariadb", mariadb, raising=False)
    expected = dict.fromkeys(("account_id", "operation", "idempotency_key"), of_keys)
    expected |= dict.fromkeys(("response_body", "response_reference"), of_texts)
    columns = {name: IdempotencyRecord._meta.get_field(name).db_parameters(connection) for name in expected}
    assert {name: column.get("collation") for name, column in columns.items()} == expected


@pytest.mark.django_db
def test_a_mysql_database_is_identified_by_its_server_and_name():
    statements = []

    def answer(execute, sql, params, many, context):
        statements.append(sql)
        return execute("SELECT 'db.internal', 3306, 'shop'", params, many, context)

    with connection.execute_wrapper(answer):
        assert MySQLUpkeep(mysql).identity() == ("db.internal", 3306, "shop")
    assert statements == ["SELECT @@hostname, @@port, DATABASE()"]


@pytest.mark.parametrize(("vendor", "limited"), [("mysql", True), ("oracle", False)])
def test_a_dedicated_mysql_connection_has_a_timeout_for_every_wait(vendor, limited, monkeypatch):
    limits = {"connect_timeout": LIMIT, "read_timeout": LIMIT, "write_timeout": LIMIT}
    monkeypatch.setattr(type(connection), "vendor", vendor)
    monkeypatch.setitem(
        connections.settings, "renewals", {**connection.settings_dict, "OPTIONS": {"pool": True, "a": 1}}
    )

    def opened():
        open_own_connection("default", "renewals")
        return connections["default"].alias, connections["default"].settings_dict["OPTIONS"]

    assert elsewhere(opened) == ("default", {"a": 1} | (limits if limited else {}))
