"""A dedicated, unpooled connection for one thread. Every wait for the server has a timeout.

Django's connections wait without a limit. The kernel detects a lost host after minutes, and never detects a frozen
process or a pooler without a free session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from django.db import connections

from .. import foreign

#: How long, in seconds, the server may take to open a session and to answer each statement. This package's statements
#: wait at most one second for a lock.
LIMIT = 5

LOOK_EVERY = 0.1  # seconds


def open_own_connection(using: str, entry: str) -> None:
    """Give this thread a separate connection for alias ``using``, with the settings of alias ``entry``."""
    connection: Any = connections[entry].copy(alias=using)
    options = connection.settings_dict["OPTIONS"]
    options.pop("pool", None)
    if connection.vendor == "postgresql":
        options["connect_timeout"] = LIMIT
        foreign.set_opener(connection, partial(_open_session, connection.get_new_connection, connection.Database))
    elif connection.vendor == "mysql":
        options.update(connect_timeout=LIMIT, read_timeout=LIMIT, write_timeout=LIMIT)
    connections[using] = connection


def _open_session(connect: Callable[[Any], Any], driver: Any, parameters: Any) -> Any:
    """Open a PostgreSQL session with a timeout for each answer. libpq has no such timeout."""
    session = connect(parameters)

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return foreign.wait_selector(driver)(_in_time(work), session.fileno(), LOOK_EVERY)
        except TimeoutError as error:
            session.close()
            raise driver.OperationalError(f"The server did not answer within {LIMIT} seconds.") from error

    foreign.set_wait(session, wait)
    return session


def _in_time(work: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run the driver's generator until the limit. It yields what it waits for, and is resumed after ``LOOK_EVERY``."""
    ends = time.monotonic() + LIMIT
    ready = None
    while True:
        try:
            awaited = work.send(ready)
        except StopIteration as end:
            return end.value
        ready = yield awaited
        if not ready and time.monotonic() >= ends:
            raise TimeoutError
