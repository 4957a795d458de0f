"""Find the records of a trace.

The key of a consumer's record begins with the trace of its message. The trace of the first operation is a digest of
account, operation and key, and no column holds it: a column with an index would cost each claim a random page of the
index, for a question that is asked once in a hundred thousand claims. So the digests are computed here, of the newest
records first. All records of one account can be searched in any table. Without the account, a time limit bounds the
search, and the page says how far it got.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from django.db.models import QuerySet

from ..identity.scope import Scope
from ..store import statement_timeout

TRACE: Final = re.compile("[0-9a-f]{32}")

#: Seconds for one search. That is longer than other pages take, because it reads hundreds of thousands of records.
LIMIT = 3.0

#: How many records each statement reads.
PAGE = 2_000


class SearchEndedError(Exception):
    """The time was over. ``args`` are the number of records that were searched, and when the oldest was created."""


def find_first(pools: Iterable[QuerySet[Any]], trace: str) -> Any:
    """The id of the record of a trace's first operation, or None.

    :raises SearchEndedError: the time was over before all records were searched.
    """
    end = time.monotonic() + LIMIT
    for records in pools:
        searched, oldest, reached = 0, None, None
        while searched % PAGE == 0:
            page = records if oldest is None else records.filter(pk__lt=oldest)
            rows = _read(page, end, searched, reached)
            for pk, account_id, operation, key, _ in rows:
                if not key.startswith(trace) and Scope(account_id, operation, key).trace == trace:
                    return pk
            if not rows:
                break
            searched += len(rows)
            oldest, *_, reached = rows[-1]
    return None


def _read(page: QuerySet[Any], end: float, searched: int, reached: datetime | None) -> list[Any]:
    columns = ("pk", "account_id", "operation", "idempotency_key", "created_at")
    try:
        with statement_timeout.time_limit(page.db, end - time.monotonic()):
            return list(page.order_by("-pk").values_list(*columns)[:PAGE])
    except statement_timeout.OutOfTimeError:
        raise SearchEndedError(searched, reached) from None
