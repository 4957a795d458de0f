"""Effects, counted where they happen: the rows that the charges of this run left in the database."""

from __future__ import annotations

from collections import defaultdict

from django.db import connection

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
    return TABLES[side]._default_manager.filter(label__startswith=f"{run}-").count()


def database_name() -> str:
    """What the charges are written to, for people."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            return f"PostgreSQL {cursor.fetchone()[0].split()[0]}"
    return connection.display_name
