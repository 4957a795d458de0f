"""The store of PostgreSQL."""

from __future__ import annotations

from .bodies import Bodies
from .claims import Claims
from .counters import Counters
from .layout import Layout
from .outbox import Outbox
from .purge import Purge
from .replication import Replicated
from .size import Size


class PostgreSQLStore(Claims, Purge, Bodies, Layout, Outbox, Counters, Size, Replicated):
    """PostgreSQL. Each change is one statement."""
