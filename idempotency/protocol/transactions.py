"""A fenced change in a transaction of its own, and the answer to a caller if the record's database fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.db import DatabaseError, InterfaceError

from ..exceptions import UnavailableError
from ..store import own_transaction, store_for
from .ownership import Ownership

logger = logging.getLogger("idempotency")

#: Permanent errors that were logged already. A half-finished deploy causes one or two kinds of them at every request.
_reported: set[str] = set()
MAX_REPORTED = 100

#: How often an attempt with an outside effect tries to write. The pause doubles, so all pauses take about 1.5 seconds,
#: in which a restarting server may come back. On PostgreSQL each try waits a second for a lock, so all tries together
#: outlast a frozen peer, whose session the server ends after 5 seconds.
MAX_TRIES = 5
FIRST_PAUSE = 0.1

T = TypeVar("T")


def fenced_change(owned: Ownership, change: Callable[[], T], *, step: str = "") -> T:
    """Make a fenced change in a transaction of its own.

    If an operation has an effect outside of the database, its outcome must not be lost because the connection died
    during the call to the outside, or because the server refused the change for the sake of another transaction. So it
    makes the same change again, over a new connection if need be. The fence lets it happen only once.

    :param change: makes the change. It may be called again after a COMMIT that succeeded and whose answer was lost.
    :param step: the name of the step that the change belongs to. Without a step, the change is one statement.
    :returns: what ``change`` returns.
    """
    what = f"Step {step!r} of operation {owned.scope.operation!r}" if step else owned.policy.operation
    tries = 1 if owned.policy.transaction or owned.shares_connection else MAX_TRIES
    store = store_for(owned.using)
    connection = store.connection
    for number in range(1, tries + 1):
        session = connection.connection
        try:
            with own_transaction(store, what, one_statement=not step):
                return change()
        except (DatabaseError, InterfaceError) as error:
            if number == tries:
                raise
            if not store.is_busy(error):
                # Django may have noticed the broken connection itself and connected again.
                if session is not None and session is connection.connection and connection.is_usable():
                    raise
                connection.close()
            time.sleep(FIRST_PAUSE * 2 ** (number - 1))  # nothing reports that a server is back, or a rival gone
    raise AssertionError  # pragma: no cover - the last try returns or raises


@contextmanager
def store_errors(using: str) -> Iterator[None]:
    """Turn an error of the database in the block into an ``UnavailableError``."""
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        raise unavailable(using, error) from error


def unavailable(using: str, error: Exception) -> UnavailableError:
    """Make the error that a caller gets for an error of the record's database.

    A permanent error, such as a missing column after half a deploy, is logged once and has no ``Retry-After``, because
    every retry would meet it again.
    """
    if not store_for(using).is_permanent(error):
        return UnavailableError(retry_after=1)
    kind = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if kind not in _reported and len(_reported) < MAX_REPORTED:
        _reported.add(kind)
        logger.critical(
            "Every protected operation fails: the tables of idempotency in database %r don't fit this release (%s). "
            "Run manage.py migrate, or finish the deploy.",
            using,
            kind,
            exc_info=error,
        )
    return UnavailableError("The request could not be recorded. A retry fails, too, until the service is repaired.")
