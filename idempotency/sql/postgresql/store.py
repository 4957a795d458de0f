"""The store of PostgreSQL."""

from __future__ import annotations

from .claims import Claims
from .counters import Counters
from .layout import Layout
from .outbox import Outbox
from .purge import Purge
from .size import Size


class PostgreSQLStore(Claims, Purge, Layout, Outbox, Counters, Size):
    """PostgreSQL. Each change is one statement."""
