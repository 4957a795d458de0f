"""What the first statements of a handler may be, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user_model
from django.db import connection

from testproject.models import Transfer


def write(label: str = "one", account: int | None = None) -> None:
    Transfer.objects.create(account_id=account or get_user_model().objects.values_list("pk")[:1], amount=1, label=label)


def execute(sql: Any, *parameters: Any) -> Any:
    """What a statement gives, without what differs from run to run."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        found = cursor.fetchall() if cursor.description else None
        return [found, cursor.rowcount, cursor.statusmessage, cursor.nextset()]


def first(*statements: Any) -> Callable[[], Any]:
    """A handler that begins with these statements and then writes. It continues after an error."""

    def handler() -> Any:
        seen: list[Any] = []
        for statement in statements:
            try:
                seen.append(execute(*statement) if isinstance(statement, tuple) else execute(statement))
            except Exception as error:  # noqa: BLE001 - what is compared
                seen.append(of(error))
        seen.append(connection.connection.info.transaction_status.name)
        write()
        return seen

    return handler


def of(error: BaseException | None) -> list[list[Any]]:
    """An error and its causes."""
    found = []
    while error is not None:
        found.append([type(error).__name__, getattr(error, "sqlstate", None)])
        error = error.__cause__
    return found


INSERT = (
    "INSERT INTO testproject_transfer (recipient, amount, label, created_at, account_id) "
    "SELECT '', 1, 'raw', now(), min(id) FROM auth_user"
)

#: What the first statement is.
BEGINNINGS: dict[str, tuple[Any, ...]] = {
    "a select": ("SELECT 1",),
    "an insert": (INSERT,),
    "an insert that returns": (f"{INSERT} RETURNING label",),
    "with parameters": (("SELECT %s, '%%'", "50% ; COMMIT"),),
    "a percent sign without parameters": ("SELECT '%'",),
    "a semicolon at the end": ("SELECT 1 ; ",),
    "a semicolon in a text": ("SELECT ';'",),
    "a word in a text": ("SELECT 'COMMIT', 1 AS rollback",),
    "two statements": ("SELECT 1; SELECT 2",),
    "two statements, the second of which fails": (f"{INSERT}; SELECT 1 / 0",),
    "a commit and an error in one text": (f"{INSERT}; COMMIT; SELECT 1 / 0",),
    "a comment": ("SELECT 1 -- and no more",),
    "only a comment": ("-- nothing",),
    "nothing": ("",),
    "a syntax error": ("SELEKT 1",),
    "a syntax error and more": ("SELEKT 1", "SELECT 1"),
    "a division by zero": ("SELECT 1 / 0",),
    "a missing parameter": (("SELECT %s, %s", 1), INSERT),
    "a parameter that has no form": (("SELECT %s", object()), INSERT),
    "a begin": ("BEGIN",),
    "a commit": ("COMMIT",),
    "a commit and chain": ("COMMIT AND CHAIN",),
    "a rollback": ("ROLLBACK",),
    "a prepared transaction": ("PREPARE TRANSACTION 'edge'",),
    "a look at the level": ("SHOW transaction_isolation",),
    "a level": ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SHOW transaction_isolation"),
    "a savepoint": ("SAVEPOINT mine", INSERT, "ROLLBACK TO SAVEPOINT mine"),
    "vacuum": ("VACUUM testproject_transfer",),
    "a cursor": ("DECLARE mine CURSOR FOR SELECT 1", "FETCH ALL FROM mine"),
    "copy by execute": ("COPY testproject_transfer TO STDOUT",),
}
