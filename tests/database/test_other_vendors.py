"""What holds on databases that stand in here by their name or by the codes of their errors alone."""

import re
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import Mock

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError, connections
from django.test.utils import CaptureQueriesContext

from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.identity.scope import Scope
from idempotency.models import IdempotencyRecord
from idempotency.store import Fence, Store
from idempotency.store.mysql import MySQLStore
from idempotency.store.own_connection import LIMIT, open_own_connection
from tests.concurrency.racing import elsewhere

connection = connections["default"]
mysql, portable = MySQLStore(connection), Store(connection)


@pytest.mark.parametrize(
    ("error", "meanings"),
    [
        (IntegrityError(1062, "Duplicate entry 'k'"), {"is_duplicate"}),
        (IntegrityError(1048, "Column 'status' cannot be null"), set()),
        (OperationalError(1213, "Deadlock found"), {"lost_a_race", "is_busy", "commit_was_refused"}),
        (OperationalError(1020, "Record has changed"), {"lost_a_race", "is_busy", "commit_was_refused"}),
        (OperationalError(1205, "Lock wait timeout exceeded"), {"timed_out_waiting", "is_busy"}),
        (ProgrammingError(1146, "Table 'record' doesn't exist"), {"is_permanent"}),
        (OperationalError(1054, "Unknown column 'record'"), {"is_permanent"}),
        (OperationalError(2006, "Server has gone away"), set()),
        (OperationalError(), set()),
    ],
    ids=lambda value: str(value.args[0]) if isinstance(value, Exception) and value.args else "",
)
def test_the_numbers_of_the_errors_of_mysql_have_their_meanings(error, meanings):
    questions = {"is_duplicate", "lost_a_race", "timed_out_waiting", "is_busy", "commit_was_refused", "is_permanent"}
    assert {question for question in questions if getattr(mysql, question)(error)} == meanings


def test_an_unknown_database_is_known_by_the_kinds_of_its_errors():
    assert portable.is_duplicate(IntegrityError("of any text"))
    assert portable.is_permanent(ProgrammingError("of any text"))
    assert not portable.is_busy(OperationalError("of any text"))


@pytest.mark.django_db
def test_a_transaction_that_can_not_be_watched_is_not_taken_for_one_that_has_ended():
    with portable.watch_transaction() as watch:
        watch.look()
    assert watch.ended is False


ENDINGS = (
    *("COMMIT", " commit work", "ROLLBACK", "rollback and chain", "BEGIN", "INSERT INTO t VALUES (1); COMMIT"),
    *("START TRANSACTION", "TRUNCATE t", "LOCK TABLES t", "CREATE TABLE t (a INT)", "ALTER TABLE t ADD b INT"),
    "DROP TABLE t",
)
OTHERS = (
    *("ROLLBACK TO SAVEPOINT s", "ROLLBACK WORK TO s", "SAVEPOINT s", "SELECT 'commit'", "SET @a = 1"),
    *("CREATE TEMPORARY TABLE t (a INT)", "INSERT INTO begin VALUES (1)"),
)


@pytest.mark.failure_64
@pytest.mark.parametrize(
    ("statement", "ends"),
    [(text, True) for text in ENDINGS] + [(text, False) for text in OTHERS],
)
def test_mysql_s_statements_that_end_a_transaction_are_known_by_their_first_words(statement, ends):
    watch = mysql.watch_transaction()
    watch(lambda *arguments: None, statement, None, False, {})
    assert watch.ended is ends


@pytest.mark.failure_64
@pytest.mark.parametrize(("statement", "ends"), [("CREATE TABLE t (a INT)", True), ("SELECT 1 / 0", False)])
def test_mysql_s_statements_on_the_schema_end_a_transaction_before_they_fail(statement, ends):
    watch = mysql.watch_transaction()
    with pytest.raises(OperationalError):
        watch(Mock(side_effect=OperationalError), statement, None, False, {})
    assert watch.ended is ends


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("mariadb", "begins"), [(True, "SET STATEMENT innodb_lock_wait_timeout = 1 FOR "), (False, "")]
)
def test_mariadb_s_claims_wait_for_a_bounded_time(mariadb, begins, monkeypatch):
    monkeypatch.setitem(vars(connection), "mysql_is_mariadb", mariadb)
    sent = []
    with mysql.bounded_wait(), connection.execute_wrapper(lambda execute, sql, *rest: sent.append(sql)):
        connection.cursor().execute("INSERT")
    assert sent == [f"{begins}INSERT"]


@pytest.mark.django_db
def test_each_claim_and_each_change_of_one_is_bounded_on_mysql(monkeypatch):
    bounded = []
    monkeypatch.setattr(mysql, "bounded_wait", lambda: nullcontext(bounded.append(None)))
    scope, minute = Scope("1", "tests.bounded", "k"), timedelta(minutes=1)
    pk = mysql.insert_claim(scope, "v1:1", lease=minute, ttl=minute, wait_for_disk=True)
    assert len(bounded) == 1
    assert mysql.park(Fence(scope, pk, 1, "v1:1"))
    assert len(bounded) == 2


@pytest.mark.django_db
def test_mysql_s_claim_is_committed_with_its_statement_but_in_a_test_case(monkeypatch):
    monkeypatch.setattr(mysql, "own_transaction", lambda what: nullcontext())
    driver = Mock()
    monkeypatch.setattr(connection, "connection", driver)
    for savepoints in ([], ["of a test case"]):
        monkeypatch.setattr(connection, "savepoint_ids", savepoints)
        with mysql.own_statement("A claim"):
            driver.autocommit.assert_called_once_with(True)


@pytest.mark.django_db
def test_a_connection_that_mysql_closes_before_a_claim_is_an_error_of_djangos(monkeypatch):
    monkeypatch.setattr(mysql, "own_transaction", lambda what: nullcontext())
    monkeypatch.setattr(connection, "savepoint_ids", [])
    monkeypatch.setattr(connection, "connection", Mock())
    connection.connection.autocommit.side_effect = connection.Database.OperationalError
    with pytest.raises(OperationalError), mysql.own_statement("A claim"):
        pass


@pytest.mark.django_db
@pytest.mark.parametrize(("level", "by_id"), [("read committed", True), ("repeatable read", False), (None, False)])
def test_mysql_locks_rows_by_their_ids_unless_a_snapshot_is_older_than_the_locks(level, by_id, monkeypatch):
    monkeypatch.setattr(connection, "isolation_level", level, raising=False)
    for name in "abc":
        IdempotencyCounter.objects.create(operation=name, event="claimed")
    rows = IdempotencyCounter.objects.exclude(operation="b").order_by("-operation").values_list("operation", flat=True)
    with CaptureQueriesContext(connection) as statements:
        assert (mysql.select_unlocked(rows), mysql.select_unlocked(rows, 1)) == (["c", "a"], ["c"])
    conditions = [one["sql"].partition(" WHERE ")[2] for one in statements.captured_queries]
    assert ["operation" in condition for condition in conditions] == ([True, False, True] * 2 if by_id else [True] * 2)


@pytest.mark.except_mariadb
@pytest.mark.parametrize(
    ("partial", "columns"), [(True, ["status", "lease_expires_at"]), (False, ["lease_expires_at"])]
)
def test_an_index_of_unfinished_records_holds_no_other_column_where_it_would_hold_every_record(
    partial, columns, monkeypatch
):
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
def test_a_database_of_mysql_is_known_by_its_server_and_its_name():
    asked = []

    def answer(execute, sql, params, many, context):
        asked.append(sql)
        return execute("SELECT 'db.internal', 3306, 'shop'", params, many, context)

    with connection.execute_wrapper(answer):
        assert mysql.identity() == ("db.internal", 3306, "shop")
    assert asked == ["SELECT @@hostname, @@port, DATABASE()"]


@pytest.mark.parametrize(("vendor", "limited"), [("mysql", True), ("oracle", False)])
def test_the_driver_of_mysql_limits_the_waits_of_a_connection_that_a_thread_has_for_itself(
    vendor, limited, monkeypatch
):
    limits = {"connect_timeout": LIMIT, "read_timeout": LIMIT, "write_timeout": LIMIT}
    monkeypatch.setattr(type(connection), "vendor", vendor)

    def options():
        open_own_connection("default", "default")
        return connections["default"].settings_dict["OPTIONS"]

    assert (limits.items() <= elsewhere(options).items()) is limited
