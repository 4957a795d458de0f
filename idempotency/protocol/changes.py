"""A fenced change in a transaction of its own, which outlives the connection that it is sent over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, connections

from .ownership import Ownership
from .transactions import own_transaction

#: An attempt with an effect outside of the database tries so often to write when its connection is found broken, with
#: a pause that doubles: about 1.5 seconds in all, in which a server that is restarted comes back.
MAX_TRIES = 5
FIRST_PAUSE = 0.1

T = TypeVar("T")


def fenced_change(owned: Ownership, change: Callable[[], T], *, step: str = "") -> T:
    """Make a fenced change in a transaction of its own.

    An operation with effects outside of the database must not lose what has happened because its connection died while
    it talked to somebody else. So it connects again and makes the same change again: the fence lets it happen once.

    :param change: may be called again after a COMMIT that was carried out and whose answer was lost.
    :param step: the name of the step that the change belongs to. Without a step the change is one statement.
    """
    what = f"Operation {owned.operation.name!r}"
    if step:
        what = f"Step {step!r} of operation {owned.operation.name!r}"
    tries = 1 if owned.operation.transaction or owned.shares_connection else MAX_TRIES
    connection = connections[owned.using]
    for number in range(1, tries + 1):
        session = connection.connection
        try:
            with own_transaction(owned.using, what, one_statement=not step):
                return change()
        except (DatabaseError, InterfaceError):
            # Django may have noticed by itself, and connected again.
            session_is_sound = session is not None and session is connection.connection and connection.is_usable()
            if session_is_sound or number == tries:
                raise
            connection.close()
            time.sleep(FIRST_PAUSE * 2 ** (number - 1))  # the server may be on its way back; nothing tells when it is
    raise AssertionError  # pragma: no cover - the last try returns or raises
