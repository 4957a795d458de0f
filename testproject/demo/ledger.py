"""Effects, counted where they happen: the rows that the charges of this run left in the database."""

from __future__ import annotations

from collections import defaultdict

from django.db import connection

from idempotency.models import IdempotencyRecord
from testproject.models import BaseCharge, Charge, UnprotectedCharge

from .verdict import Effects

TABLES: dict[str, type[BaseCharge]] = {"protected": Charge, "unprotected": UnprotectedCharge}


def effects_of(side: str, run: str) -> Effects:
    """Every row of the run, by account and label. A row that no charge of the run accounts for is among them, too."""
    found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    rows = TABLES[side]._default_manager.filter(label__startswith=f"{run}-").order_by("pk")
    for account, label, pk in rows.values_list("account__username", "label", "pk"):
        found[account, label].append(pk)
    return dict(found)


def count_effects(side: str, run: str) -> int:
    count: int = TABLES[side]._default_manager.filter(label__startswith=f"{run}-").count()
    return count


def count_take_overs(run: str) -> int:
    """How often a claim of the run changed hands, because its worker had died or stood still for too long."""
    records = IdempotencyRecord.objects.filter(idempotency_key__startswith=f"{run}-")
    return sum(attempt - 1 for attempt in records.values_list("attempt", flat=True))


def can_be_outlived() -> bool:
    """Whether another can take over a claim while the stalled holder's transaction is open.

    In SQLite it can't: there is one writer at a time, so everybody waits for the stalled one.
    """
    return connection.vendor != "sqlite"


def database_name() -> str:
    """What the charges are written to, for people."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            return f"PostgreSQL {cursor.fetchone()[0].split()[0]}"
    return connection.display_name
