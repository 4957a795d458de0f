"""Handlers with ``atomic()`` blocks inside, on PostgreSQL. Each is in ``SAVEPOINTS``."""

from contextlib import contextmanager, suppress
from functools import partial

from django.contrib.auth import get_user_model
from django.db import connection, transaction

from testproject.models import Transfer
from tests.concurrency.failures import cut_connection, fail
from tests.concurrency.scenarios import INSERT, execute, of, write


def observed(call):
    """What a call returns or raises, and the state in which it leaves Django."""
    try:
        found = call()
    except Exception as error:  # noqa: BLE001 - compared by the tests
        found = of(error)
    return [found, len(connection.savepoint_ids), connection.needs_rollback]


def steps(*calls):
    """A handler that makes these calls and returns what each did. It continues after an error."""
    return lambda: [observed(call) for call in calls]


def block(*calls, **options):
    """A call that makes these calls in an ``atomic()`` block, up to the first error."""

    def run():
        with transaction.atomic(**options):
            return [call() for call in calls]

    return run


def swallowing(*calls):
    """A call that makes these calls, and goes on after an error of any."""
    return lambda: [observed(call) for call in calls]


def select(sql="SELECT 1"):
    return partial(execute, sql)


divide_by_zero = select("SELECT 1 / 0")
misspell = select("SELECT 1 FORM FORM auth_user")
miss_a_column = select("SELECT nothing FROM auth_user")
one, two, three = (partial(write, label) for label in ("one", "two", "three"))


def set_rollback():
    transaction.set_rollback(True)


def unset_rollback():
    transaction.set_rollback(False)


# What does not pass Django's cursor wrapper, or can't be a part of a longer message


def copy(sql="COPY auth_user (username) TO STDOUT"):
    def run():
        with connection.cursor() as cursor, cursor.copy(sql) as copied:
            return list(copied.rows())

    return run


def copy_in():
    user = execute("SELECT id FROM auth_user")[0][0][0]
    columns = "recipient, amount, label, created_at, account_id"
    with connection.cursor() as cursor, cursor.copy(f"COPY testproject_transfer ({columns}) FROM STDIN") as copied:
        copied.write_row(["", 1, "copied", "now", user])


def stream(sql="SELECT generate_series(1, 2)"):
    def run():
        with connection.cursor() as cursor:
            return list(cursor.cursor.stream(sql))

    return run


def call_procedure(argument="a"):
    def run():
        with connection.cursor() as cursor:
            cursor.callproc("chr", [argument])

    return run


def many(sql="SELECT 1 / %s"):
    def run(*parameters):
        with connection.cursor() as cursor:
            cursor.executemany(sql, [[each] for each in parameters])

    return run


def compose():
    from psycopg import sql

    return execute(sql.SQL("SELECT {}").format(sql.Literal(1)))


def driver(sql=INSERT):
    return lambda: connection.connection.execute(sql).statusmessage


def drivers_cursor(sql=INSERT):
    def run():
        with connection.cursor() as cursor:
            return cursor.cursor.execute(sql).statusmessage

    return run


def in_a_transaction_of_the_driver(*calls):
    def run():
        with connection.connection.transaction():
            return [call() for call in calls]

    return run


def in_a_pipeline():
    with connection.connection.pipeline():
        execute(INSERT)


def iterate():
    return [user.username for user in get_user_model().objects.iterator(chunk_size=1)]


def under_a_wrapper(*calls):
    """A wrapper of the handler receives what Django executes. Names of savepoints differ from run to run."""

    def run():
        received = []

        def wrapper(execute, sql, params, many, context):
            received.append(sql.split('"')[0])
            return execute(sql, params, many, context)

        with connection.execute_wrapper(wrapper):
            for call in calls:
                call()
        return received

    return run


#: Calls that pass by Django's wrapper, or are executed by themselves, as they succeed.
PASSING_BY = {
    "copy": copy(),
    "copy in": copy_in,
    "stream": stream(),
    "a procedure": call_procedure(97),
    "many": partial(many(), 1, 2),
    "a composed statement": compose,
    "the driver": driver(),
    "the driver's cursor": drivers_cursor(),
    "a transaction of the driver": in_a_transaction_of_the_driver(one, driver()),
    "a failing transaction of the driver": in_a_transaction_of_the_driver(driver(), divide_by_zero),
    "a pipeline": in_a_pipeline,
    "a server's cursor": iterate,
    "a wrapper": under_a_wrapper(one, block(two)),
    "several statements": select(f"{INSERT}; SELECT 1"),
    "nothing": select(""),
    "failing copy": copy("COPY nothing TO STDOUT"),
    "failing stream": stream("SELECT 1 / 0"),
    "misspelt stream": stream("SELEKT"),
    "a failing procedure": call_procedure(-1),
    "failing many": partial(many(), 1, 0),
    "the driver fails": driver("SELECT 1 / 0"),
    "the driver's cursor fails": drivers_cursor("SELECT 1 / 0"),
    "several statements fail": select(f"{INSERT}; SELECT 1 / 0"),
    "division by zero": divide_by_zero,
    "a syntax error": misspell,
    "a missing column": miss_a_column,
    "a missing parameter": partial(execute, "SELECT %s, %s", 1),
}

#: Those that may be the first call of a handler. A transaction of the driver commits by itself if none is open.
BEGINNINGS = {name: call for name, call in PASSING_BY.items() if "transaction of the driver" not in name}


# Blocks and savepoints


def by_hand(*sequence):
    """A handler of ``transaction.savepoint()``. ``"+a"`` sets the savepoint a, ``"-a"`` releases it, ``"<a"`` returns
    to it."""

    def handler():
        ids = {}
        act = {
            "+": lambda name: ids.update({name: transaction.savepoint()}),
            "-": lambda name: transaction.savepoint_commit(ids[name]),
            "<": lambda name: transaction.savepoint_rollback(ids[name]),
        }
        return [observed(partial(act[each[0]], each[1:]) if isinstance(each, str) else each) for each in sequence]

    return handler


def unnumbered(*calls):
    """Let Django give each savepoint the same name."""

    def handler():
        seen = []
        for call in calls:
            transaction.clean_savepoints()
            seen.append(observed(call))
        return seen

    return handler


def nested_with_equal_names():
    with transaction.atomic():
        one()
        transaction.clean_savepoints()
        with suppress(RuntimeError), transaction.atomic():
            two()
            fail()
        three()


def open_a_cursor_and_leave(fetched):
    def run():
        with transaction.atomic():
            cursor = connection.chunked_cursor()
            cursor.execute("SELECT 6 / number FROM generate_series(2, 0, -1) AS number")
            first = cursor.fetchone()
        with cursor:
            return [first, cursor.fetchmany(fetched)]

    return run


@contextmanager
def isolation(level):
    from psycopg import IsolationLevel

    connection.connection.isolation_level = IsolationLevel[level]
    yield


def set_level():
    with isolation("SERIALIZABLE"):
        return execute("SHOW transaction_isolation")


def callbacks(*blocks):
    """A handler whose blocks each register a callback. Returns which callbacks are left."""

    def handler():
        seen = []
        for number, make in enumerate(blocks):
            seen.append(observed(make(lambda number=number: transaction.on_commit(partial(int, number)))))
        return [*seen, [callback.args for _, callback, _ in connection.run_on_commit if isinstance(callback, partial)]]

    return handler


def get_or_create():
    user = get_user_model().objects.get()
    made = [Transfer.objects.get_or_create(label="one", defaults={"account": user, "amount": 1})[1] for _ in range(2)]
    return [*made, Transfer.objects.update_or_create(label="one", defaults={"amount": 2})[1]]


SAVEPOINTS = {
    "a block": steps(block(one)),
    "a block and more": steps(block(one), two),
    "more and a block": steps(one, block(two)),
    "a block between": steps(one, block(two), three),
    "an empty block": steps(block()),
    "an empty block and more": steps(block(), one),
    "empty blocks in each other": steps(block(block(), block(block()))),
    "blocks in turn": steps(block(one), block(two), block(three)),
    "blocks in turn, the first fails": steps(block(one, fail), block(two), block(three)),
    "blocks in turn, the second fails": steps(block(one), block(two, fail), block(three)),
    "blocks in turn, the last fails": steps(block(one), block(two), block(three, fail)),
    "a block in a block": steps(block(block(one))),
    "a block in a block and more": steps(block(block(one), two), three),
    "three blocks in each other": steps(block(block(block(one), two), three)),
    "the inner block fails": steps(block(one, swallowing(block(two, fail)), three)),
    "the inner block fails first": steps(block(swallowing(block(one, fail)), two)),
    "the inner block fails without a statement": steps(block(swallowing(block(fail)), two)),
    "the outer block fails": steps(block(block(one), fail), two),
    "the outer block fails after more": steps(block(block(one), two, fail), three),
    "the outer block fails before the inner one": steps(block(swallowing(block(block(), fail)), one, fail), two),
    "both blocks fail": steps(block(swallowing(block(one, fail)), two, fail), three),
    "the block fails without a statement": steps(block(fail), one),
    "an error is swallowed in the block": steps(block(swallowing(divide_by_zero)), one),
    "an error is swallowed in the inner block": steps(block(swallowing(block(swallowing(divide_by_zero))), one), two),
    "an error after the block": steps(block(one), divide_by_zero, two),
    "an error after the block in a block": steps(block(one, swallowing(block(block(two), divide_by_zero))), three),
    "a syntax error after the block": steps(block(one), misspell, two),
    "a syntax error after the block in a block": steps(block(one, swallowing(block(block(two), misspell))), three),
    "an error of the handler after the block": steps(block(one), fail),
    "a wrapper around the block": steps(under_a_wrapper(block(one), two)),
    "a block without a savepoint": steps(block(one, savepoint=False)),
    "a failing block without a savepoint": steps(block(one, swallowing(block(fail, savepoint=False)))),
    "a durable block": steps(block(one, durable=True), two),
    "a durable block in a block": steps(block(swallowing(block(one, durable=True)), two)),
    "set_rollback": steps(block(one, set_rollback), two),
    "set_rollback without a statement": steps(block(set_rollback), one),
    "set_rollback and a block": steps(block(set_rollback, block(set_rollback)), one),
    "set_rollback and a statement": steps(block(set_rollback, swallowing(one)), two),
    "set_rollback taken back": steps(block(one, swallowing(block(fail, savepoint=False)), unset_rollback)),
    "set_rollback of the whole": steps(block(one), set_rollback),
    "set_rollback and a savepoint by hand": by_hand(set_rollback, "+a", unset_rollback, one),
    "set_rollback and a release by hand": by_hand("+a", one, set_rollback, "-a", unset_rollback),
    "set_rollback and a return by hand": by_hand("+a", set_rollback, "<a", unset_rollback, one),
    "by hand": by_hand("+a", one, "-a"),
    "by hand, left open": by_hand("+a", one),
    "by hand, undone": by_hand("+a", one, "<a", two, "-a"),
    "by hand, undone and left open": by_hand("+a", one, "<a", two),
    "by hand, undone before anything": by_hand("+a", "<a", one, "<a", two),
    "by hand, the inner undone before anything": by_hand("+a", "+b", "<b", one, "<b", two, "<a", three),
    "by hand, the outer undone before anything": by_hand("+a", "+b", "<a", one, "<b"),
    "by hand, the outer released before anything": by_hand("+a", "+b", "-a", one, "<b"),
    "by hand, the outer released": by_hand("+a", one, "+b", two, "-a", "<b"),
    "by hand, the outer undone": by_hand("+a", one, "+b", two, "<a", "-b"),
    "by hand, the outer undone after a release": by_hand("+a", one, "+b", two, "-b", "<a", three),
    "by hand, undone after the release": by_hand("+a", one, "-a", "<a"),
    "by hand, released twice": by_hand("+a", one, "-a", "-a"),
    "by hand, released twice before anything": by_hand("+a", "-a", "-a"),
    "by hand, released in turn": by_hand("+a", "+b", one, "-b", "-a"),
    "by hand, released and set": by_hand("+a", one, "-a", "+b", two, "<b"),
    "by hand, undone after an error": by_hand("+a", divide_by_zero, "<a", one),
    "by hand, undone after a syntax error": by_hand("+a", misspell, "<a", one),
    "by hand, undone after an error of the driver": by_hand("+a", driver("SELECT 1 / 0"), "<a", one),
    "by hand, released after an error": by_hand("+a", divide_by_zero, "-a", "<a", one),
    "equal names": unnumbered(block(one), block(two, fail), block(three)),
    "equal names in each other": steps(nested_with_equal_names),
    "a deferred constraint": steps(block(partial(write, account=2**31 - 1)), one),
    "a deferred constraint that is checked": steps(
        block(partial(write, account=2**31 - 1), select("SET CONSTRAINTS ALL IMMEDIATE")), one
    ),
    "a setting of the block": steps(block(select("SET LOCAL lock_timeout = 7")), select("SHOW lock_timeout")),
    "a setting that is undone": steps(
        block(select("SET LOCAL lock_timeout = 7"), fail), select("SHOW lock_timeout"), one
    ),
    "a level": steps(block(select("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"))),
    "a level of the driver": steps(block(one, set_level), two),
    "a cursor that is left open": steps(open_a_cursor_and_leave(1), one),
    "a cursor that fails after the block": steps(open_a_cursor_and_leave(2), one),
    "callbacks": callbacks(block, lambda call: block(one, call), lambda call: block(call, fail), lambda call: call),
    "callbacks in each other": callbacks(
        lambda call: block(block(call), fail), lambda call: block(swallowing(block(call, fail)), call)
    ),
    "get_or_create": steps(get_or_create),
    "get_or_create in a block": steps(block(get_or_create)),
    **{f"{name} first in the block": steps(block(call, one), two) for name, call in BEGINNINGS.items()},
    **{
        f"{name} alone in two blocks": steps(block(one, swallowing(block(block(call)))))
        for name, call in PASSING_BY.items()
    },
    **{f"{name} alone in the block": steps(block(call)) for name, call in BEGINNINGS.items()},
    **{f"{name} swallowed in the block": steps(block(swallowing(call)), one) for name, call in BEGINNINGS.items()},
    **{f"{name} after the block": steps(block(one), call, two) for name, call in PASSING_BY.items()},
    **{
        f"{name} after the inner block": steps(block(block(one), call, two), three) for name, call in PASSING_BY.items()
    },
}

#: These end the transaction themselves, so their twin is only the protected one.
ENDINGS = {
    **{
        f"{name} {where}": handler
        for name, end in {
            "commit": select("COMMIT"),
            "rollback": select("ROLLBACK"),
            "commit and chain": select("COMMIT AND CHAIN"),
            "the driver's commit": lambda: connection.connection.commit(),
            "the driver's rollback": lambda: connection.connection.rollback(),
            "the driver's COMMIT": driver("COMMIT"),
            "prepare": select("PREPARE TRANSACTION 'edge'"),
            "close": lambda: connection.close(),
            "the driver closes": lambda: connection.connection.close(),
            "cut": cut_connection,
        }.items()
        for where, handler in {
            "in the block": steps(block(one, end), two),
            "last in the block": steps(block(one, end)),
            "after the block": steps(block(one), end, two),
            "last after the block": steps(block(one), end),
        }.items()
    },
}
