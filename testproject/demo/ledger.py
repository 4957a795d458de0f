"""Effects, counted where they happen: rows in the database, payouts and fees in the provider's ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from django.db import connection
from django.db.models import QuerySet

from idempotency.models import IdempotencyRecord, MessageStatus, OutboxMessage
from testproject.models import (
    BaseCharge,
    BasePayout,
    BaseReceipt,
    Charge,
    Payout,
    Receipt,
    UnprotectedCharge,
    UnprotectedPayout,
    UnprotectedReceipt,
)
from testproject.provider import read_ledger

from . import orders
from .payouts import CONTROL, Side, run_of
from .plan import Charge as PlannedCharge
from .verdict import Effects, HopEffects

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


def order_charges(side: orders.Side, run: str) -> Effects:
    """What the handlers of the orders wrote themselves."""
    return effects_of("protected" if side is orders.OUTBOX else "unprotected", orders.run_of(side, run))


def hop_effects(side: orders.Side, run: str, ledger: Path) -> HopEffects:
    """What came of the messages of a side's orders: how often, by the order's label and the message."""
    prefix = f"{orders.run_of(side, run)}-"
    receipts: type[BaseReceipt] = Receipt if side is orders.OUTBOX else UnprotectedReceipt
    labels = receipts._default_manager.filter(label__startswith=prefix).values_list("label", flat=True)
    found = Counter((label, orders.RECEIPT) for label in labels)
    found.update((effect.label, orders.FEE) for effect in read_ledger(ledger) if effect.label.startswith(prefix))
    return found


def count_hop_effects(side: orders.Side, run: str, ledger: Path) -> int:
    return sum(hop_effects(side, run, ledger).values())


def count_messages(run: str) -> int:
    """What the orders of a run have published through the outbox."""
    return _messages(run).count()


def are_messages_pending(run: str) -> bool:
    return _messages(run).filter(status=MessageStatus.PENDING).exists()


def _messages(run: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.filter(payload__contains=f'"{orders.run_of(orders.OUTBOX, run)}-')


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
