"""Effects, counted where they happen: the rows of the charges in the database, the payouts in the provider's ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from django.db import connection

from idempotency.models import IdempotencyRecord
from testproject.models import BaseCharge, BasePayout, Charge, Payout, UnprotectedCharge, UnprotectedPayout
from testproject.provider import read_ledger

from .payouts import CONTROL, Side, run_of
from .plan import Charge as PlannedCharge
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


def payouts_of(side: Side, run: str, ledger: Path, planned: Iterable[PlannedCharge]) -> Effects:
    """Every payout of the run and the side in a provider's ledger, by account and label.

    The provider knows no accounts. One that nobody has planned is among them all the same.
    """
    accounts = {payout.label: payout.account for payout in planned}
    found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for effect in read_ledger(ledger):
        if effect.label.startswith(f"{run_of(side, run)}-"):
            found[accounts.get(effect.label, ""), effect.label].append(effect.id)
    return dict(found)


def count_payouts(side: Side, run: str, ledger: Path) -> int:
    return sum(effect.label.startswith(f"{run_of(side, run)}-") for effect in read_ledger(ledger))


def count_rows(side: Side, run: str) -> int:
    """Our own rows of a side's payouts."""
    model: type[BasePayout] = UnprotectedPayout if side.name == CONTROL else Payout
    count: int = model._default_manager.filter(label__startswith=f"{run_of(side, run)}-").count()
    return count


def count_take_overs(run: str) -> int:
    """How often a claim of the run changed hands, because its worker had died, stood still for too long or failed."""
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
