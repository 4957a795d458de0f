"""Handlers that begin, fail and end in every way, on PostgreSQL. Each is in ``SCENARIOS``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.contrib.auth import get_user_model
from django.db import DatabaseError, connection, connections, transaction

from idempotency.models import IdempotencyRecord
from idempotency.store.postgresql import claims
from testproject.models import Transfer
from tests.concurrency.beginnings import BEGINNINGS, INSERT, execute, first, write
from tests.concurrency.failures import cut_connection, fail
from tests.concurrency.racing import PATIENCE, elsewhere, is_waited_for
from tests.concurrency.traces import record
from tests.providers import eventually
from tests.records import HOUR, from_now

WORDS = f'invalid input syntax for type integer: "{claims.FENCE_MISSED}"'

#: A row with such a label is refused by COMMIT, with this SQLSTATE.
REFUSED = {
    "refused as by the fence": ("22P02", WORDS),
    "refused with the fence's code": ("22P02", "limit exceeded"),
    "refused with the fence's words": ("P0001", WORDS),
    "refused for a race": ("40001", "limit exceeded"),
    "refused by a stop": ("57P01", "limit exceeded"),
}
CREATE_TRIGGER = f"""
CREATE FUNCTION refuse_transfer() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    {
    " ".join(
        f'''IF NEW.label = {"'" + label.replace("'", "''") + "'"} THEN
        RAISE EXCEPTION '{words}' USING ERRCODE = '{code}'; END IF;'''
        for label, (code, words) in REFUSED.items()
    )
}
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER refuse_transfer AFTER INSERT ON testproject_transfer DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION refuse_transfer()
"""

SCENARIOS: dict[str, Callable[[], Any]] = {name: first(*statements) for name, statements in BEGINNINGS.items()}


def scenario(handler: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[handler.__name__] = handler
    return handler


@scenario
def no_statement() -> str:
    return "done"


@scenario
def a_savepoint_first() -> None:
    with transaction.atomic():
        write()


@scenario
def a_savepoint_that_is_undone() -> None:
    with suppress(DatabaseError), transaction.atomic():
        execute("SELECT 1 / 0")
    write()


@scenario
def select_for_update_by_a_cursor_of_the_server() -> list[str]:
    found = [user.username for user in get_user_model().objects.select_for_update().iterator(chunk_size=1)]
    write()
    return [*found, *(row.label for row in Transfer.objects.iterator(chunk_size=1))]


@scenario
def copy_first() -> list[Any]:
    with connection.cursor() as cursor, cursor.copy("COPY auth_user (username) TO STDOUT") as copy:
        rows = list(copy.rows())
    write()
    return rows


@scenario
def a_procedure_first() -> Any:
    with connection.cursor() as cursor:
        cursor.callproc("upper", ["a"])
        return cursor.fetchall()


@scenario
def many_first() -> Any:
    with connection.cursor() as cursor:
        cursor.executemany("SELECT set_config('edge.' || %s, '1', true)", [["a"], ["b"]])
    return execute("SELECT current_setting('edge.b')")


@scenario
def a_composed_statement_first() -> Any:
    from psycopg import sql

    return execute(sql.SQL("SELECT {}").format(sql.Literal(1)))


@scenario
def the_driver_first() -> Any:
    connection.connection.execute(INSERT)
    return execute("SELECT 1")


@scenario
def a_transaction_of_the_driver_first() -> Any:
    with suppress(Exception), connection.connection.transaction():
        execute(INSERT)
    return execute("SELECT 1")


@scenario
def a_pipeline_first() -> Any:
    with connection.connection.pipeline():
        execute(INSERT)
    return execute("SELECT 1")


@scenario
def the_driver_is_told_to_read_only() -> Any:
    connection.connection.read_only = True
    try:
        return execute(INSERT)
    finally:
        connection.connection.rollback()
        connection.connection.read_only = None


@scenario
def a_wrapper_that_writes_before_each_statement() -> Any:
    def wrapper(execute: Any, sql: str, *rest: Any) -> Any:
        if sql != INSERT:
            with connection.cursor() as cursor:
                cursor.execute(INSERT)
        return execute(sql, *rest)

    with connection.execute_wrapper(wrapper):
        execute("SELECT 1 / 0")


@scenario
def rows_of_a_first_statement_one_by_one() -> Any:
    with connection.cursor() as cursor:
        cursor.execute("SELECT generate_series(1, 5) AS n")
        assert cursor.description is not None
        return [cursor.fetchone(), cursor.fetchmany(2), list(cursor), cursor.rowcount, cursor.description[0][0]]


@scenario
def a_foreign_key_to_nothing() -> None:
    write(account=2**31 - 1)


def refused_with(label: str) -> Callable[[], None]:
    def handler() -> None:
        write(label)

    return handler


SCENARIOS |= {label: refused_with(label) for label in REFUSED}


@scenario
def an_error() -> None:
    write()
    fail()


@scenario
def an_error_before_any_statement() -> None:
    fail()


@scenario
def set_rollback() -> None:
    write()
    transaction.set_rollback(True)


@scenario
def an_error_that_is_swallowed() -> str:
    with suppress(DatabaseError):
        execute("SELECT 1 / 0")
    return "done"


@scenario
def an_error_in_on_commit() -> None:
    write()
    transaction.on_commit(fail)


@scenario
def killed_before_the_first_statement() -> None:
    if record().attempt == 1:
        cut_connection()
    write()


@scenario
def killed_before_the_update() -> None:
    write()
    if record().attempt == 1:
        cut_connection()


@scenario
def killed_without_a_statement() -> None:
    cut_connection()


@scenario
def closed_by_the_driver() -> None:
    write()
    connection.connection.close()


@scenario
def told_something_before_the_update() -> None:
    """Not every word of the server is its last."""
    connection.connection.execute("LISTEN edge")
    write()
    elsewhere(lambda: execute("NOTIFY edge"))


@scenario
def taken_over() -> None:
    write()
    elsewhere(lambda: IdempotencyRecord.objects.update(attempt=2))


@scenario
def taken_over_while_the_update_waits() -> None:
    """The record matches when the update begins, and does not when the update gets its lock."""
    if record().attempt > 1:
        return
    locked = threading.Event()

    def take_over() -> None:
        with transaction.atomic():
            IdempotencyRecord.objects.update(attempt=2)
            locked.set()
            assert eventually(is_waited_for)
        connections.close_all()

    write()
    threading.Thread(target=take_over).start()
    assert locked.wait(PATIENCE)


@scenario
def the_record_changes() -> None:
    """Under SERIALIZABLE the update is then refused."""
    write()
    elsewhere(lambda: IdempotencyRecord.objects.update(expires_at=from_now(HOUR)))


@scenario
def a_write_skew() -> None:
    def insert_as_well() -> None:
        with transaction.atomic():
            execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            write(f"{Transfer.objects.count()} before")

    label = f"{Transfer.objects.count()} before"
    elsewhere(insert_as_well)
    write(label)
