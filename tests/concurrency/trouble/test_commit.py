"""A COMMIT that is refused, never arrives, or whose response is lost; handlers that end their own transaction."""

import re
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connection, connections, transaction

from idempotency import claim, current_claim
from idempotency.exceptions import InProgressError, OuterTransactionError
from idempotency.models import IdempotencyRecord
from idempotency.signals import completed
from idempotency.store import store_for
from testproject.models import Transfer
from tests.concurrency.failures import BROKEN, UNKNOWN, fail, problem, server_error, unreachable
from tests.concurrency.traces import effects, record, session_settings, state
from tests.concurrency.urls import handler
from tests.operations import receiving


@contextmanager
def business_commit(replacement):
    """Replace the COMMIT of the next transaction that writes an effect by ``replacement(commit)``. If COMMIT is sent
    with the completing update, ``commit`` sends both."""
    database = connections["default"]
    commit, is_due = database._commit, True

    def replace(send):
        nonlocal is_due
        if not is_due or not handler.attempts:
            return send()
        is_due = False
        return replacement(lambda: send() and None)

    def wrapper(execute, sql, *rest):
        send = partial(execute, sql, *rest)
        return replace(send) if sql.rstrip().endswith("COMMIT") else send()

    database._commit = lambda: replace(commit)
    try:
        with database.execute_wrapper(wrapper):
            yield
    finally:
        database._commit = commit


def lose(commit):
    """Let the connection break before COMMIT is sent."""
    if connection.vendor == "postgresql":
        connection.connection.pgconn.finish()
    unreachable()


@pytest.mark.postgres
@pytest.mark.except_citus  # where any error of COMMIT may be the answer of another server
def test_an_error_before_commit_is_sent_is_not_a_server_response(post):
    with business_commit(fail):
        assert post().status_code == 500
    assert state() == ("recoverable", [])
    assert record().error == "RuntimeError: on purpose"
    assert post().status_code == 201


@pytest.mark.failure_60
def test_a_deferred_constraint_failing_at_commit_is_the_handlers_failure(post, account):
    """Foreign keys are only checked by COMMIT, on both databases."""
    unknown = str(int(account) + 1000)
    answer = post(account=unknown)
    assert answer.status_code == 500  # as unprotected, with the handler's own IntegrityError
    assert state() == ("recoverable", [])
    assert post(account=unknown).status_code == 500
    assert handler.attempts == [1, 2]


@pytest.mark.failure_26
@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError(), IntegrityError("raised by the callback"), OperationalError("no route")),
        InProgressError(retry_after=1),  # the error of another claim, in a ``claim()`` block of the callback
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failing_on_commit_callback_keeps_the_recorded_outcome(post, error):
    """An error of any type belongs to the project, because COMMIT has already succeeded."""
    seen = []
    handler.after = lambda request: transaction.on_commit(Mock(side_effect=error))
    with receiving(completed, then=lambda: seen.append(record().status)) as announced:
        answer = post()
        assert (answer.status_code, "problem" in answer["Content-Type"]) == (500, False)
        assert state() == ("completed", ["one"])
        assert (seen, [event["attempt"] for event in announced]) == (["completed"], [1])
        retry = post()
    assert (retry.status_code, retry["Idempotency-Replayed"]) == (201, "true")
    assert (effects(), handler.attempts, len(announced)) == (["one"], [1], 1)


BOUNDS = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "synchronous_commit")


@pytest.mark.failure_59
@pytest.mark.postgres
@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/inside/", marks=pytest.mark.except_citus),  # where the completing update is a separate message
        "/again/",
    ],
)
def test_our_timeouts_do_not_apply_to_the_handler_or_its_commit(post, path):
    """COMMIT checks deferred foreign keys, and may wait there for a row that another transaction has locked.

    It waits for the disk.
    """
    seen = {}
    handler.after = lambda request: seen.update(handler=session_settings(*BOUNDS))

    def look(commit):
        seen["commit"] = session_settings(*BOUNDS)
        commit()

    with business_commit(look):
        assert post(path).status_code == 201
    bounds = ["0", "0", "0", "on"]
    # Without a transaction the completing update is committed by itself.
    assert seen == {"handler": bounds} | ({} if path == "/again/" else {"commit": bounds})


@pytest.mark.failure_60
@pytest.mark.postgres
@pytest.mark.django_db
@pytest.mark.parametrize(
    ("question", "yes", "no"),
    [
        (
            "commit_was_refused",
            ["23503", "P0001", "57014", "53100", "40001", "25P02"],
            ["08006", "57P01", "57P02", "58030", "XX000", ""],  # a lost connection, or a server that stops
        ),
        ("is_permanent", ["42P01", "0A000", "22P02", "23502"], ["23505", "40001", "08006"]),  # each retry would fail
    ],
)
def test_the_sqlstates_of_postgresql_are_classified(question, yes, no):
    predicate = getattr(store_for("default"), question)
    assert [sqlstate for sqlstate in yes + no if predicate(server_error(sqlstate))] == yes


OUTER_TRANSACTION = (500, "idempotency_outer_transaction")


def execute(statement):
    def run(request):
        with connection.cursor() as cursor:
            cursor.execute(statement)

    return run


def commit_in_the_driver(request):
    connection.connection.commit()


def close_in_the_driver(request):
    connection.connection.close()


def be_refused_by(statement):
    """Fail the statement, then continue."""

    def run(request):
        with pytest.raises(DatabaseError):
            execute(statement)(request)

    return run


be_refused = be_refused_by("SELECT no_such_column")


def be_refused_in_a_savepoint(statement):
    def run(request):
        with pytest.raises(DatabaseError), transaction.atomic():
            execute(statement)(request)

    return run


@pytest.fixture(autouse=True)
def _procedures(transactional_db):
    """Only MariaDB's procedures can end the transaction of their caller."""
    if connection.vendor == "mysql":
        for name, body in {
            "commits": "START TRANSACTION; COMMIT",
            "only_reads": "SELECT 1",
            "refuses": "SIGNAL SQLSTATE '45000'",
        }.items():
            execute(f"CREATE OR REPLACE PROCEDURE {name}() BEGIN {body}; END")(None)


def write_more(request):
    Transfer.objects.create(account_id=int(request.headers["X-Account"]), amount=1, label="after")


def in_turn(*acts):
    def run(request):
        for act in acts:
            act(request)

    return run


#: PostgreSQL statements that replace the handler's transaction, and the effects that may be left.
REPLACING = [
    *((sql, ["one"]) for sql in ("COMMIT AND CHAIN", "COMMIT; BEGIN", "SELECT 1; END; BEGIN")),
    *((sql, []) for sql in ("ROLLBACK AND CHAIN", "ROLLBACK; BEGIN", "abort and chain")),
]


#: What a COMMIT leaves after a refused statement.
LEFT_OF_REFUSED = [] if connection.vendor == "postgresql" else ["one"]


@pytest.mark.failure_64
@pytest.mark.parametrize(
    ("ends", "left"),
    [
        pytest.param(execute("COMMIT"), ["one"], id="commit"),
        pytest.param(execute("ROLLBACK"), [], id="rollback"),
        # SQLite opens no other transaction for what is written after the COMMIT.
        pytest.param(
            in_turn(execute("COMMIT"), write_more),
            ["after", "one"] if connection.vendor == "sqlite" else ["one"],
            id="commit and a write",
        ),
        pytest.param(in_turn(execute("COMMIT"), fail), ["one"], id="commit and a failure"),
        pytest.param(in_turn(execute("COMMIT"), execute("SELECT no_such_column")), ["one"], id="commit and a refusal"),
        *(
            pytest.param(in_turn(*acts), left, marks=pytest.mark.except_mariadb, id=name)
            for name, acts, left in (
                ("in the driver", [commit_in_the_driver], ["one"]),
                ("in the driver, and a failure", [commit_in_the_driver, fail], ["one"]),
                ("in the driver, refused", [be_refused, commit_in_the_driver, fail], LEFT_OF_REFUSED),
            )
        ),
        *(pytest.param(execute(sql), left, marks=pytest.mark.postgres, id=sql) for sql, left in REPLACING),
        pytest.param(execute("COMMIT; SELECT 1 / 0"), ["one"], marks=pytest.mark.postgres, id="commit and an error"),
        *(
            pytest.param(call, left, marks=pytest.mark.mariadb, id=name)
            for name, call, left in (
                ("a procedure that commits", execute("CALL commits()"), ["one"]),
                ("a statement that commits", execute("ANALYZE TABLE auth_user"), ["one"]),
                ("a refused statement that commits", be_refused_by("CREATE TABLE auth_user (id INT)"), ["one"]),
                ("in a savepoint", transaction.atomic(execute("COMMIT AND CHAIN")), ["one"]),
                ("several statements", execute("SELECT 1; COMMIT; SELECT no_such_column"), ["one"]),
            )
        ),
    ],
)
def test_a_handler_that_ends_its_transaction_is_detected_and_not_rerun(post, ends, left, caplog):
    handler.after = ends
    answer = post()
    assert problem(answer) == BROKEN
    assert "has ended its transaction itself" in caplog.text
    assert record().status == "parked"
    # An operator has to know what ended the attempt.
    assert record().error.partition(":")[0] in {
        *("TransactionBrokenError", "RuntimeError", "DataError", "ProgrammingError", "OperationalError")
    }
    assert effects() == left
    handler.after = lambda request: None
    assert problem(post()) == UNKNOWN
    assert (effects(), handler.attempts) == (left, [1])


@pytest.mark.failure_64
@pytest.mark.parametrize(
    "undo",
    [
        pytest.param(in_turn(close_in_the_driver, fail), id="closed"),
        pytest.param(in_turn(close_in_the_driver, execute("SELECT 1")), id="closed and read"),
        pytest.param(
            execute("INSERT OR ROLLBACK INTO auth_user (id, username) VALUES (1, 'x')"), marks=pytest.mark.sqlite
        ),
    ],
)
def test_a_handler_whose_transaction_is_undone_by_its_error_runs_again(post, undo):
    handler.after = undo
    assert post().status_code == 500
    assert state() == ("recoverable", [])
    handler.after = lambda request: None
    assert post().status_code == 201
    assert effects() == ["one"]


@pytest.mark.failure_64
@pytest.mark.parametrize(
    "statement",
    [
        *("SELECT 'COMMIT'", "SELECT 1 AS rollback", "SELECT CASE WHEN 1 = 1 THEN 2 END", "SELECT '; begin', 'commit'"),
        *(
            pytest.param(sql, marks=pytest.mark.except_sqlite)
            for sql in ("SELECT 1; SELECT 'begin; commit and chain'", "CREATE TEMPORARY TABLE chain (a INT)")
        ),
        pytest.param("SELECT 1; DO $$ BEGIN NULL; END $$", marks=pytest.mark.postgres),
        pytest.param("CALL only_reads()", marks=pytest.mark.mariadb),
    ],
)
def test_a_statement_that_only_mentions_an_end_is_harmless(post, statement):
    handler.after = execute(statement)
    assert post().status_code == 201
    assert state() == ("completed", ["one"])


#: Texts that fail and contain what may end a transaction: a column, a function's body, a literal.
FAILING = [
    pytest.param("SELECT commit FROM auth_user", id="a column"),
    *(
        pytest.param(sql, marks=pytest.mark.postgres, id=name)
        for name, sql in {
            "a column behind a prefix": "SELECT set_config('a.b', '1', true); SELECT start, commit FROM auth_user",
            "a body": "DO $$ BEGIN RAISE EXCEPTION 'x'; END $$",
            "a literal": "SELECT 1; SELECT 'begin; commit and chain' / 0",
        }.items()
    ),
    pytest.param("CALL refuses()", marks=pytest.mark.mariadb, id="a procedure"),
]


@pytest.mark.failure_64
@pytest.mark.parametrize("statement", FAILING)
@pytest.mark.parametrize("before", [None, transaction.atomic(write_more)], ids=["", "after a block"])
def test_a_failed_statement_is_not_taken_for_an_end(post, statement, before):
    handler.before = before or (lambda request: None)
    handler.after = execute(statement)
    assert post().status_code == 500
    assert state() == ("recoverable", [])
    handler.after = be_refused_in_a_savepoint(statement)
    assert post().status_code == 201
    assert record().status == "completed"


@pytest.mark.failure_64
@pytest.mark.parametrize(
    "comment",
    [lambda sql: re.sub(r"^\w+", r"\g<0> /* order-abort */", sql), lambda sql: f"{sql} /* route='commit' */"],
    ids=["behind the first word", "at the end"],
)
def test_a_commented_return_to_a_savepoint_does_not_end_the_transaction(post, comment):
    handler.after = be_refused_in_a_savepoint("SELECT no_such_column")
    with connection.execute_wrapper(lambda execute, sql, *rest: execute(comment(sql), *rest)):
        assert post().status_code == 201
    assert state() == ("completed", ["one"])


def test_a_worker_that_exits_in_a_handler_releases_nothing(post):
    handler.before = Mock(side_effect=SystemExit)
    with pytest.raises(SystemExit):
        post()
    assert state() == ("in_progress", [])
    assert current_claim() is None


@pytest.fixture
def _autocommit_is_on_again(transactional_db):
    yield
    connection.rollback()
    connection.set_autocommit(True)


@pytest.mark.failure_63
@pytest.mark.usefixtures("_autocommit_is_on_again")
@pytest.mark.parametrize("path", ["/inside/", "/park/"])
def test_a_claim_with_autocommit_off_is_refused_before_anything_runs(post, path, caplog):
    connection.set_autocommit(False)
    answer = post(path)
    assert problem(answer) == OUTER_TRANSACTION
    assert "autocommit off" in caplog.text
    connection.rollback()
    assert (handler.attempts, IdempotencyRecord.objects.count()) == ([], 0)


@pytest.mark.failure_63
def test_a_database_configured_with_autocommit_off_is_refused(transactional_db, monkeypatch):
    # On a separate connection, because this thread's connection must stay as it is in a test.
    other = connections["default"].copy()
    other.settings_dict["AUTOCOMMIT"] = False
    mine, connections["default"] = connections["default"], other
    try:
        with pytest.raises(OuterTransactionError, match="autocommit off"), claim("tests.x", account_id="1", key="k"):
            raise AssertionError("nothing may run")
    finally:
        other.close()
        connections["default"] = mine
    assert IdempotencyRecord.objects.count() == 0


@pytest.mark.failure_63
def test_an_outcome_left_uncommitted_is_not_acknowledged(post):
    """The handler left autocommit off, so its outcome would be lost with its connection."""
    handler.after = lambda request: connection.set_autocommit(False)
    assert problem(post("/park/")) == BROKEN
    assert connection.get_autocommit()
    assert (record().status, current_claim()) == ("parked", None)
