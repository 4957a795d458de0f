"""A statement timeout for admin and monitoring queries: the table may be huge, or locked by a migration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DatabaseError, connections, transaction

#: Together with the rest of an admin page, this stays below a budget of 200 ms.
LIMIT = 0.15  # seconds

_QUERY_CANCELED = "57014"


class OutOfTimeError(Exception):
    """The database did not finish in time."""


@contextmanager
def time_limit(using: str, limit: float | None = None) -> Iterator[None]:
    """On PostgreSQL, cancel each statement in the block that takes longer than ``limit``.

    Has no effect on other databases.

    :param limit: in seconds; by default ``LIMIT``.
    :raises OutOfTimeError: a statement was cancelled, or the limit is not positive.
    """
    milliseconds = int((LIMIT if limit is None else limit) * 1000)
    if milliseconds < 1:  # 0 would mean no limit
        raise OutOfTimeError
    connection = connections[using]
    if connection.vendor != "postgresql":
        yield
        return
    try:
        # Under ATOMIC_REQUESTS this is a savepoint. A setting outlives a released savepoint, so the previous value is
        # restored. If the block raises, the rollback restores it.
        with transaction.atomic(using), connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('statement_timeout')")
            (before,) = cursor.fetchone()
            _set(cursor, str(milliseconds))
            yield
            _set(cursor, before)
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) == _QUERY_CANCELED:
            raise OutOfTimeError from error
        raise


@contextmanager
def connection_as_found(using: str) -> Iterator[None]:
    """Close the thread's connection at the end, unless it was already open.

    Django has already closed old connections when this runs, and under ASGI the thread ends with the request.
    """
    connection = connections[using]
    was_open = connection.connection is not None
    try:
        yield
    finally:
        if not was_open:
            connection.close()


def _set(cursor: Any, value: str) -> None:
    cursor.execute("SELECT set_config('statement_timeout', %s, true)", [value])
