"""Does the table want a fillfactor? An update is cheaper where the record's page has room for the new row.

A record is inserted small and updated once, when it holds the response. Between the two, other requests insert theirs
into the same page, so what counts is how many claims are in flight. The update can't be heap-only (HOT) in any case,
because it takes the record out of the index that recovery reads.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from django.db import connection

from . import views
from .instruments import log_position, preparing
from .report import Table, bytes_of

FILLFACTORS = (100, 85, 70, 50)
IN_FLIGHT = (1, 20, 200)
BODY = '{"id": 123456, "recipient": "acct_1", "amount": 1250, "label": "benchmark", "created_at": "2000-01-01T00:00Z"}'
TABLE = "benchmark_pages"


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    operations *= 5  # or a page more or less, and what the log starts with, would show in the figures
    sizes = (f"{what}, a record" for what in ("WAL", "heap", "indexes"))
    table = Table("Fillfactor of the record's table", ("fillfactor", "claims in flight", "HOT updates", *sizes))
    for fillfactor in FILLFACTORS:
        for in_flight in IN_FLIGHT:
            progress(f"pages, fillfactor {fillfactor}, {in_flight} in flight")
            with connection.cursor() as cursor:
                _fresh_table(cursor, fillfactor)
                try:
                    wal = _fill(operations, in_flight)
                    hot, heap, indexes = _pages(cursor)
                finally:
                    cursor.execute(f"DROP TABLE {TABLE}")
            parts = (bytes_of(size / operations) for size in (wal, heap, indexes))
            table.add(str(fillfactor), str(in_flight), f"{hot / operations:.0%}", *parts)
    return [table]


def _fresh_table(cursor: Any, fillfactor: int) -> None:
    cursor.execute(f"DROP TABLE IF EXISTS {TABLE}")
    cursor.execute(f"CREATE TABLE {TABLE} (LIKE idempotency_record INCLUDING ALL) WITH (fillfactor = {fillfactor})")
    # Whole pages go to the log after a checkpoint. One now, with the table still empty, gives each run the same.
    cursor.execute("CHECKPOINT")


def _fill(operations: int, in_flight: int) -> int:
    """Claim and complete as many records, each in transactions of its own. The bytes of log that took."""
    insert = views.INSERT_WITHOUT_DISK.replace("handwritten_record", TABLE)
    # The claim turns waiting off; without a business write there is nothing here for the completion to wait for.
    complete = views.COMPLETE.replace("handwritten_record", TABLE)
    claimed: deque[int] = deque()
    with preparing() as cursor:
        cursor.execute("SET synchronous_commit = off")
        before = log_position(cursor)
        for _ in range(operations):
            cursor.execute(insert, ("1", str(uuid.uuid4()), views.DIGEST))
            claimed.append(cursor.fetchone()[0])
            if len(claimed) == in_flight:
                cursor.execute(complete, (BODY, claimed.popleft()))
        while claimed:
            cursor.execute(complete, (BODY, claimed.popleft()))
        written = log_position(cursor) - before
        cursor.execute("RESET synchronous_commit")
    return written


def _pages(cursor: Any) -> tuple[int, int, int]:
    cursor.execute("SELECT pg_stat_force_next_flush()")
    cursor.execute(
        "SELECT n_tup_hot_upd, pg_relation_size(relid), pg_indexes_size(relid)"
        " FROM pg_stat_user_tables WHERE relname = %s",
        [TABLE],
    )
    hot, heap, indexes = cursor.fetchone()
    return hot, heap, indexes
