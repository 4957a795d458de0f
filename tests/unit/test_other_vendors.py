"""What holds on databases that stand in here by their name or by the codes of their errors alone."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError, connections

from idempotency.models import IdempotencyRecord
from idempotency.sql.mysql import MySQLStore
from idempotency.sql.portable import PortableStore

mysql, portable = MySQLStore(connections["default"]), PortableStore(connections["default"])


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
def test_the_numbers_of_the_errors_of_mysql_have_their_meanings(error: Exception, meanings: set[str]) -> None:
    questions = {"is_duplicate", "lost_a_race", "timed_out_waiting", "is_busy", "commit_was_refused", "is_permanent"}
    assert {question for question in questions if getattr(mysql, question)(error)} == meanings


def test_an_unknown_database_is_known_by_the_kinds_of_its_errors() -> None:
    assert portable.is_duplicate(IntegrityError("of any text"))
    assert portable.is_permanent(ProgrammingError("of any text"))
    assert not portable.is_busy(OperationalError("of any text"))


@pytest.mark.django_db
def test_a_transaction_that_can_not_be_watched_is_not_taken_for_one_that_has_ended() -> None:
    with portable.watch_transaction() as watch:
        watch.look()
    assert watch.ended is False


@pytest.mark.failure_mode(64)
@pytest.mark.parametrize(
    ("statement", "ends"),
    [
        *[(text, True) for text in ("COMMIT", " commit work", "ROLLBACK", "rollback and chain", "BEGIN")],
        *[
            (text, True)
            for text in ("INSERT INTO t VALUES (1); COMMIT", "START TRANSACTION", "TRUNCATE t", "LOCK TABLES t")
        ],
        *[(text, True) for text in ("CREATE TABLE t (a INT)", "ALTER TABLE t ADD b INT", "DROP TABLE t")],
        *[
            (text, False)
            for text in ("ROLLBACK TO SAVEPOINT s", "ROLLBACK WORK TO s", "SAVEPOINT s", "SELECT 'commit'")
        ],
        *[(text, False) for text in ("CREATE TEMPORARY TABLE t (a INT)", "INSERT INTO begin VALUES (1)", "SET @a = 1")],
    ],
)
def test_mysql_s_statements_that_end_a_transaction_are_known_by_their_first_words(statement: str, ends: bool) -> None:
    watch = mysql.watch_transaction()
    watch(lambda *arguments: None, statement, None, False, {})
    assert watch.ended is ends


@pytest.mark.failure_mode(20)
@pytest.mark.parametrize(
    ("vendor", "mariadb", "collation"),
    [
        ("postgresql", False, "C"),
        ("mysql", False, "utf8mb4_0900_bin"),
        ("mysql", True, "utf8mb4_nopad_bin"),
        ("sqlite", False, None),
    ],
)
def test_keys_are_compared_byte_for_byte(
    vendor: str, mariadb: bool, collation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections["default"]
    monkeypatch.setattr(connection, "vendor", vendor)
    monkeypatch.setattr(connection, "mysql_is_mariadb", mariadb, raising=False)
    for name in ("account_id", "operation", "idempotency_key"):
        column = IdempotencyRecord._meta.get_field(name).db_parameters(connection)
        assert column.get("collation") == collation
