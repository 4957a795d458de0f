"""What a number of operations a day needs of the database, computed from what one record was measured to need.

The measurements are those of ``docs/explanation/growth.md``, on PostgreSQL with accounts and keys that are UUID4s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86_400  # seconds

# Measured, in bytes. A record's row without its body, and its entries in the indexes.
ROW = 325
SCOPE_ENTRY = 158
OTHER_ENTRIES = 91
#: A table that is purged and vacuumed all the time has free space: a fifth more rows, a tenth more in the indexes.
FREE_ROWS = 1.2
FREE_ENTRIES = 1.1
#: Log of a claim and its completing update, without the body and without whole pages.
LOG = 1_570
#: Log of a deleted record, and of its part of the vacuum.
PURGE_LOG = 3_400
#: After a checkpoint, the first change of a page of an index writes the whole page to the log.
PAGE = 8_192
PAGE_IMAGE = 5_900


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the application does."""

    operations_per_day: float
    #: The part of all operations that is retried once.
    retries: float = 0.02
    #: Bytes of a recorded response's body.
    body: float = 400
    retention: float = 3  # days
    #: How many times the mean the busiest second is.
    peak: float = 3
    #: Seconds for which a handler with ``transaction=True`` keeps its connection.
    handler: float = 0.05
    #: Seconds between two checkpoints of the server.
    checkpoint: float = 300
    #: How many rows a second one purge deletes.
    purge_rate: float = 20_000


@dataclass(frozen=True)
class Size:
    """What the database must do and hold. Sizes are in bytes, rates per second."""

    load: Load

    @property
    def operations(self) -> float:
        return self.load.operations_per_day / DAY

    @property
    def peak_operations(self) -> float:
        return self.operations * self.load.peak

    @property
    def rows(self) -> float:
        return self.load.operations_per_day * self.load.retention

    @property
    def table(self) -> float:
        return self.rows * (ROW + self.load.body) * FREE_ROWS

    @property
    def scope_index(self) -> float:
        return self.rows * SCOPE_ENTRY * FREE_ENTRIES

    @property
    def indexes(self) -> float:
        return self.scope_index + self.rows * OTHER_ENTRIES * FREE_ENTRIES

    @property
    def whole_pages(self) -> float:
        """How many whole pages an operation writes to the log, in the mean between two checkpoints.

        Operations touch random pages of the scope's index, and only the first touch of each counts. After n operations
        on p pages, p (1 - exp(-n / p)) of them have been touched.
        """
        pages = self.scope_index / PAGE
        operations = self.operations * self.load.checkpoint
        return pages / operations * -math.expm1(-operations / pages)

    @property
    def log_per_operation(self) -> float:
        return LOG + self.load.body + self.whole_pages * PAGE_IMAGE

    @property
    def log_per_day(self) -> float:
        return (self.log_per_operation + PURGE_LOG) * self.load.operations_per_day

    @property
    def flushes(self) -> float:
        """COMMITs at the peak that wait for the disk. A server that is busy flushes several at once."""
        return self.peak_operations

    @property
    def page_writes(self) -> float:
        """Pages of the table and its indexes that a checkpoint writes, at the peak."""
        sequential = (ROW + self.load.body + OTHER_ENTRIES) / PAGE
        return self.peak_operations * (self.whole_pages + sequential)

    @property
    def statements(self) -> float:
        """Round trips of the protection at the peak: a claim, BEGIN, an update, COMMIT, and two for a replay."""
        return self.peak_operations * (4 + 2 * self.load.retries)

    @property
    def connections(self) -> float:
        """Connections that are busy at the peak."""
        return self.peak_operations * self.load.handler

    @property
    def purge_time(self) -> float:
        """Seconds a day for which one purge is at work."""
        return self.load.operations_per_day / self.load.purge_rate
