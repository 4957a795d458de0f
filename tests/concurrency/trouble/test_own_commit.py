"""A handler that commits, rolls back or exits by itself, and connections on which a claim could not commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import ProgrammingError, connection, connections

from idempotency import claim, current_claim
from idempotency.exceptions import OuterTransactionError
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.concurrency.conftest import Post
from tests.concurrency.failures import UNKNOWN, fail, problem
from tests.concurrency.traces import effects, record, state
from tests.concurrency.urls import handler

BROKEN = (500, "idempotency_transaction_broken")
OUTER_TRANSACTION = (500, "idempotency_outer_transaction")


def execute(statement: str) -> Callable[[Any], None]:
    def run(request: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    return run


def commit_in_the_driver(request: Any) -> None:
    connection.connection.commit()


def commit_and_write(request: Any) -> None:
    execute("COMMIT")(request)
    Transfer.objects.create(account_id=int(request.headers["X-Account"]), amount=1, label="after")


def commit_and_fail(request: Any) -> None:
    execute("COMMIT")(request)
    fail()


@pytest.mark.failure_mode(64)
@pytest.mark.parametrize(
    ("ends", "left"),
    [
        (execute("COMMIT"), ["one"]),
        (execute("ROLLBACK"), []),
        (commit_in_the_driver, ["one"]),
        (commit_and_write, ["after", "one"]),
        (commit_and_fail, ["one"]),
    ],
    ids=["commit", "rollback", "in the driver", "commit and write", "commit and fail"],
)
def test_a_handler_that_ends_its_transaction_itself_is_noticed_and_never_run_again(
    post: Post, ends: Callable[[Any], None], left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What it wrote after its COMMIT is undone where the driver opens another transaction for it."""
    handler.after = ends
    answer = post()
    assert problem(answer) == BROKEN
    assert "has ended its transaction itself" in caplog.text
    assert record().status == "parked"
    there = effects()
    assert set(there) <= set(left)
    handler.after = lambda request: None
    assert problem(post()) == UNKNOWN
    assert (effects(), handler.attempts) == (there, [1])


def fail_and_chain(request: Any) -> None:
    with pytest.raises(ProgrammingError):
        execute("SELECT no_such_column")(request)
    execute("ROLLBACK AND CHAIN")(request)


REPLACING = ("COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "SELECT 1; END; BEGIN")


@pytest.mark.failure_mode(64)
@pytest.mark.postgres
@pytest.mark.parametrize("replace", [*map(execute, (*REPLACING, "abort and chain")), fail_and_chain])
def test_a_transaction_that_is_replaced_by_another_is_noticed(post: Post, replace: Callable[[Any], None]) -> None:
    handler.after = replace
    assert problem(post()) == BROKEN
    assert record().status == "parked"
    assert replace is not fail_and_chain or effects() == []


@pytest.mark.failure_mode(64)
@pytest.mark.parametrize("statement", ["SELECT 'COMMIT'", "SELECT 1 AS rollback", "SELECT CASE WHEN 1 = 1 THEN 2 END"])
def test_a_statement_that_only_mentions_an_end_is_none(post: Post, statement: str) -> None:
    handler.after = execute(statement)
    assert post().status_code == 201
    assert state() == ("completed", ["one"])


@pytest.mark.failure_mode(64)
def test_a_handler_that_touches_no_database_has_not_ended_its_transaction(post: Post) -> None:
    with claim("tests.nothing", account_id="1", key="nothing") as run:
        run.result = 1
    assert record("nothing").status == "completed"


def test_a_worker_that_is_told_to_exit_releases_nothing(post: Post) -> None:
    def leave(request: Any) -> None:
        raise SystemExit(1)

    handler.before = leave
    with pytest.raises(SystemExit):
        post()
    assert state() == ("in_progress", [])
    assert current_claim() is None


@pytest.fixture
def without_autocommit(transactional_db: None) -> Iterator[None]:
    connection.set_autocommit(False)
    yield
    if not connection.get_autocommit():
        connection.rollback()
        connection.set_autocommit(True)


@pytest.mark.failure_mode(63)
@pytest.mark.parametrize("path", ["/inside/", "/park/"])
def test_a_claim_with_autocommit_off_is_refused_before_anything_runs(
    post: Post, without_autocommit: None, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = post(path)
    assert problem(answer) == OUTER_TRANSACTION
    assert "autocommit off" in caplog.text
    connection.rollback()
    assert (handler.attempts, IdempotencyRecord.objects.count()) == ([], 0)


@pytest.mark.failure_mode(63)
def test_a_database_whose_setting_is_autocommit_off_is_refused(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a connection of its own: in a test, that of this thread must go on as it is.
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


@pytest.mark.failure_mode(63)
def test_an_outcome_that_can_not_be_committed_by_itself_is_not_acknowledged(post: Post) -> None:
    """The handler left autocommit off, so what it answered would be lost with its connection."""
    handler.after = lambda request: connection.set_autocommit(False)
    answer = post("/park/")
    assert problem(answer) == OUTER_TRANSACTION
    connection.rollback()
    connection.set_autocommit(True)
    assert (record().status, current_claim()) == ("in_progress", None)
