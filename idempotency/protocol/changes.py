"""A fenced change in a transaction of its own, which is tried again where another try may succeed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, connections

from .. import sql
from .ownership import Ownership
from .transactions import own_transaction

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
    what = f"Operation {owned.operation.name!r}"
    if step:
        what = f"Step {step!r} of operation {owned.operation.name!r}"
    tries = 1 if owned.operation.transaction or owned.shares_connection else MAX_TRIES
    connection, store = connections[owned.using], sql.store(owned.using)
    for number in range(1, tries + 1):
        session = connection.connection
        try:
            with own_transaction(owned.using, what, one_statement=not step):
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
