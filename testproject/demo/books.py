"""Effects, counted where they happen: rows in the database, payouts and fees in the provider's ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from django.db import connection
from django.db.models import QuerySet

from idempotency.models import IdempotencyRecord, MessageStatus, OutboxMessage
from testproject.models import Charge, Payout, Receipt, UnprotectedCharge, UnprotectedPayout, UnprotectedReceipt
from testproject.provider import Effect, Provider

from .acts import FEE, ORDERS, OUTBOX, PAYOUTS, RECEIPT, Act, Side, run_of
from .plan import account_in


@dataclass(frozen=True)
class Books:
    """Of one run. One of the providers deduplicates (True), and one never does."""

    run: str
    providers: Mapping[bool, Provider]

    def effects(self, act: Act, side: Side) -> dict[str, list[int]]:
        """The ids of what each charge, payout or order left behind, by its name.

        What nobody has planned is among them, too, and what was done for another account.
        """
        found: defaultdict[str, list[int]] = defaultdict(list)
        if act is PAYOUTS:
            for effect in self._paid(side):
                found[f"{account_in(effect.label)}/{effect.label}"].append(effect.id)
        else:
            rows = self._rows(UnprotectedCharge if side.control else Charge, side).order_by("pk")
            for account, label, pk in rows.values_list("account__username", "label", "pk"):
                found[f"{account}/{label}"].append(pk)
        return dict(found)

    def messages(self, side: Side) -> Counter[str]:
        """How often each message of a side's orders took effect, by its name."""
        receipts = self._rows(UnprotectedReceipt if side.control else Receipt, side)
        found = Counter(f"{RECEIPT}.{label}" for label in receipts.values_list("label", flat=True))
        found.update(f"{FEE}.{effect.label}" for effect in self._paid(side))
        return found

    def count(self, act: Act, side: Side) -> int:
        """How many effects there are so far."""
        if act is ORDERS:
            return self.messages(side).total()
        return sum(map(len, self.effects(act, side).values()))

    def own_rows(self, side: Side) -> int:
        """Our own rows of a side's payouts."""
        return self._rows(UnprotectedPayout if side.control else Payout, side).count()

    def take_overs(self, side: Side) -> int:
        """How often a claim changed hands, because its worker had died, stood still for too long or failed."""
        records = IdempotencyRecord.objects.filter(idempotency_key__startswith=f"{run_of(side, self.run)}-")
        return sum(attempt - 1 for attempt in records.values_list("attempt", flat=True))

    def published(self) -> QuerySet[OutboxMessage]:
        """What the orders have published through the outbox."""
        return OutboxMessage.objects.filter(payload__contains=f'"{run_of(OUTBOX, self.run)}-')

    def are_messages_pending(self) -> bool:
        return self.published().filter(status=MessageStatus.PENDING).exists()

    def are_messages_done(self) -> bool:
        """Whether everything that was published has had its effect."""
        return self.messages(OUTBOX).total() >= self.published().count()

    def _rows(self, model: type, side: Side) -> QuerySet[Charge]:
        rows: QuerySet[Charge] = model._default_manager.filter(label__startswith=f"{run_of(side, self.run)}-")  # type: ignore[attr-defined]
        return rows

    def _paid(self, side: Side) -> list[Effect]:
        paid = self.providers[side.name in {"reexecute", "outbox"}].effects()
        return [effect for effect in paid if effect.label.startswith(f"{run_of(side, self.run)}-")]


def database_name() -> str:
    """What the charges are written to, for people."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            return f"PostgreSQL {cursor.fetchone()[0].split()[0]}"
    return connection.display_name
