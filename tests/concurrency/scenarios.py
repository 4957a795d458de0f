"""Handlers that begin, fail and end in every way, on PostgreSQL. Each is in ``SCENARIOS``."""

import threading
from contextlib import suppress
from functools import partial

from django.contrib.auth import get_user_model
from django.db import DatabaseError, connection, connections, transaction

from idempotency.models import IdempotencyRecord
from idempotency.store.postgresql import statements
from testproject.models import Transfer
from tests.concurrency.failures import cut_connection, fail
from tests.concurrency.racing import PATIENCE, elsewhere, is_waited_for
from tests.concurrency.traces import record
from tests.providers import eventually
from tests.records import HOUR, from_now

WORDS = f'invalid input syntax for type integer: "{statements.FENCE_MISSED}"'

#: COMMIT refuses a row with this label, with this SQLSTATE and message.
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
INSERT = (
    "INSERT INTO testproject_transfer (recipient, amount, label, created_at, account_id) "
    "SELECT '', 1, 'raw', now(), min(id) FROM auth_user"
)


def write(label="one", account=None):
    Transfer.objects.create(account_id=account or get_user_model().objects.values_list("pk")[:1], amount=1, label=label)


def execute(sql, *parameters):
    """Execute a statement. Returns those parts of its result that don't differ between runs."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        found = cursor.fetchall() if cursor.description else None
        return [found, cursor.rowcount, cursor.statusmessage, cursor.nextset()]


def of(error):
    """An error and its causes."""
    found = []
    while error is not None:
        found.append([type(error).__name__, getattr(error, "sqlstate", None)])
        error = error.__cause__
    return found


def first(*statements):
    """A handler that begins with these statements and then writes. It continues after an error."""

    def handler():
        seen = []
        for statement in statements:
            try:
                seen.append(execute(*statement) if isinstance(statement, tuple) else execute(statement))
            except Exception as error:  # noqa: BLE001 - it is compared
                seen.append(of(error))
        seen.append(connection.connection.info.transaction_status.name)
        write()
        return seen

    return handler


def in_turn(*calls):
    """A handler that makes these calls and returns what the last one does."""
    return lambda: [call() for call in calls][-1]


def swallow(call, error=DatabaseError):
    with suppress(error):
        call()


divide_by_zero = partial(execute, "SELECT 1 / 0")


def cut_first_attempt():
    if record().attempt == 1:
        cut_connection()


def execute_in_a_transaction_of_the_driver():
    with connection.connection.transaction():
        execute(INSERT)


SCENARIOS = {
    # The first statement
    "a select": first("SELECT 1"),
    "an insert": first(INSERT),
    "an insert that returns": first(f"{INSERT} RETURNING label"),
    "with parameters": first(("SELECT %s, '%%'", "50% ; COMMIT")),
    "a percent sign without parameters": first("SELECT '%'"),
    "a semicolon at the end": first("SELECT 1 ; "),
    "a semicolon in a text": first("SELECT ';'"),
    "a word in a text": first("SELECT 'COMMIT', 1 AS rollback"),
    "two statements": first("SELECT 1; SELECT 2"),
    "two statements, the second of which fails": first(f"{INSERT}; SELECT 1 / 0"),
    "a commit and an error in one text": first(f"{INSERT}; COMMIT; SELECT 1 / 0"),
    "a comment": first("SELECT 1 -- and no more"),
    "only a comment": first("-- nothing"),
    "nothing": first(""),
    "a syntax error": first("SELEKT 1"),
    "a syntax error and more": first("SELEKT 1", "SELECT 1"),
    "a division by zero": first("SELECT 1 / 0"),
    "a missing parameter": first(("SELECT %s, %s", 1), INSERT),
    "a parameter that can't be adapted": first(("SELECT %s", object()), INSERT),
    "a begin": first("BEGIN"),
    "a commit": first("COMMIT"),
    "a commit and chain": first("COMMIT AND CHAIN"),
    "a rollback": first("ROLLBACK"),
    "a prepared transaction": first("PREPARE TRANSACTION 'edge'"),
    "a query of the level": first("SHOW transaction_isolation"),
    "a level": first("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SHOW transaction_isolation"),
    "a savepoint": first("SAVEPOINT mine", INSERT, "ROLLBACK TO SAVEPOINT mine"),
    "vacuum": first("VACUUM testproject_transfer"),
    "a cursor": first("DECLARE mine CURSOR FOR SELECT 1", "FETCH ALL FROM mine"),
    "copy by execute": first("COPY testproject_transfer TO STDOUT"),
    "no_statement": lambda: "done",
    "a_savepoint_first": transaction.atomic(write),
    "a_savepoint_that_is_undone": in_turn(partial(swallow, transaction.atomic(divide_by_zero)), write),
    "the_driver_first": in_turn(lambda: connection.connection.execute(INSERT), partial(execute, "SELECT 1")),
    "a_transaction_of_the_driver_first": in_turn(
        partial(swallow, execute_in_a_transaction_of_the_driver, Exception), partial(execute, "SELECT 1")
    ),
    # The end of the handler and of its transaction
    **{label: partial(write, label) for label in REFUSED},
    "a_foreign_key_to_nothing": partial(write, account=2**31 - 1),
    "an_error": in_turn(write, fail),
    "an_error_before_any_statement": fail,
    "set_rollback": in_turn(write, lambda: transaction.set_rollback(True)),
    "an_error_that_is_swallowed": in_turn(partial(swallow, divide_by_zero), lambda: "done"),
    "an_error_in_on_commit": in_turn(write, lambda: transaction.on_commit(fail)),
    "killed_before_the_first_statement": in_turn(cut_first_attempt, write),
    "killed_before_the_update": in_turn(write, cut_first_attempt),
    "killed_without_a_statement": cut_connection,
    "closed_by_the_driver": in_turn(write, lambda: connection.connection.close()),
    # The server sends a notification before the result of the update.
    "notified_before_the_update": in_turn(
        lambda: connection.connection.execute("LISTEN edge"),
        write,
        lambda: elsewhere(partial(execute, "NOTIFY edge")),
    ),
    "taken_over": in_turn(write, lambda: elsewhere(lambda: IdempotencyRecord.objects.update(attempt=2))),
    # Under SERIALIZABLE the update is then refused.
    "the_record_changes": in_turn(
        write, lambda: elsewhere(lambda: IdempotencyRecord.objects.update(expires_at=from_now(HOUR)))
    ),
}


def scenario(handler):
    SCENARIOS[handler.__name__] = handler
    return handler


@scenario
def select_for_update_by_a_cursor_of_the_server():
    found = [user.username for user in get_user_model().objects.select_for_update().iterator(chunk_size=1)]
    write()
    return [*found, *(row.label for row in Transfer.objects.iterator(chunk_size=1))]


@scenario
def copy_first():
    with connection.cursor() as cursor, cursor.copy("COPY auth_user (username) TO STDOUT") as copy:
        rows = list(copy.rows())
    write()
    return rows


@scenario
def a_procedure_first():
    with connection.cursor() as cursor:
        cursor.callproc("upper", ["a"])
        return cursor.fetchall()


@scenario
def many_first():
    with connection.cursor() as cursor:
        cursor.executemany("SELECT set_config('edge.' || %s, '1', true)", [["a"], ["b"]])
    return execute("SELECT current_setting('edge.b')")


@scenario
def a_composed_statement_first():
    from psycopg import sql

    return execute(sql.SQL("SELECT {}").format(sql.Literal(1)))


@scenario
def a_pipeline_first():
    with connection.connection.pipeline():
        execute(INSERT)
    return execute("SELECT 1")


@scenario
def the_driver_is_set_to_read_only():
    connection.connection.read_only = True
    try:
        return execute(INSERT)
    finally:
        connection.connection.rollback()
        connection.connection.read_only = None


@scenario
def a_wrapper_that_writes_before_each_statement():
    def wrapper(execute, sql, params, many, context):
        if sql != INSERT:
            with context["connection"].cursor() as cursor:
                cursor.execute(INSERT)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        divide_by_zero()


@scenario
def rows_of_a_first_statement_one_by_one():
    with connection.cursor() as cursor:
        rows = cursor.execute("SELECT generate_series(1, 5) AS n")
        return [rows.fetchone(), rows.fetchmany(2), list(rows), rows.rowcount, rows.description[0][0]]


@scenario
def taken_over_while_the_update_waits():
    """The record matches when the update begins, but no longer when the update gets its lock."""
    if record().attempt > 1:
        return
    locked = threading.Event()

    def take_over():
        with transaction.atomic():
            IdempotencyRecord.objects.update(attempt=2)
            locked.set()
            assert eventually(is_waited_for)
        connections.close_all()

    write()
    threading.Thread(target=take_over).start()
    assert locked.wait(PATIENCE)


@scenario
def a_write_skew():
    def insert_as_well():
        with transaction.atomic():
            execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            write(f"{Transfer.objects.count()} before")

    label = f"{Transfer.objects.count()} before"
    elsewhere(insert_as_well)
    write(label)


def with_savepoints(*, release):
    """A handler that sets savepoints by SQL, one name for each item, and uses ``atomic()`` between them."""

    def handler():
        user = get_user_model().objects.get()
        for item in ("one", "two", "refused"):
            execute("SAVEPOINT item")
            Transfer.objects.get_or_create(label=item, defaults={"account": user, "amount": 1})
            if item == "refused":
                execute("ROLLBACK TO SAVEPOINT item")
            if release:
                execute("RELEASE SAVEPOINT item")
        return [row.label for row in Transfer.objects.order_by("label")]

    return handler


@transaction.atomic
def read_only():
    seen = [execute("SET TRANSACTION READ ONLY")]
    swallow(transaction.atomic(partial(execute, INSERT)))
    return [*seen, execute("SELECT count(*) FROM testproject_transfer")]


SCENARIOS |= {
    "savepoints_of_its_own": with_savepoints(release=False),
    "savepoints_of_its_own_released": with_savepoints(release=True),
    "read_only_in_a_block": in_turn(write, read_only),
    "read_only_in_the_first_block": read_only,
    "a_write_after_a_block": in_turn(
        transaction.atomic(write),
        partial(write, "two"),
        partial(execute, "SELECT label, xmin::text = pg_current_xact_id()::text FROM testproject_transfer ORDER BY id"),
    ),
}
