"""What a test reads and moves at the database: the record, the effects, and the clock by back-dating the record."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import F

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.records import HOUR, from_now


def record(key: str = "k") -> IdempotencyRecord:
    return IdempotencyRecord.objects.get(idempotency_key=key)


def state() -> tuple[str, list[str]]:
    """The one record's status, and the effects."""
    return record().status, effects()


def is_replay(answer: Any, of: Any) -> bool:
    """Whether an answer is the recorded one of another answer."""
    return (answer.status_code, answer.content, answer.get("Idempotency-Replayed")) == (201, of.content, "true")


def effects() -> list[str]:
    return sorted(Transfer.objects.values_list("label", flat=True))


def end_lease(key: str = "k") -> None:
    """Move the database's clock past the lease, by back-dating the record."""
    moved = IdempotencyRecord.objects.filter(idempotency_key=key).update(
        lease_expires_at=F("lease_expires_at") - timedelta(hours=1)
    )
    assert moved == 1


def end_retention() -> None:
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))


def abandon() -> None:
    """Leave the record and the effects as a kill between the claim's commit and the business commit does."""
    Transfer.objects.all().delete()
    IdempotencyRecord.objects.update(
        status=Status.IN_PROGRESS,
        lease_expires_at=from_now(HOUR),
        completed_at=None,
        response_status=None,
        response_headers=None,
        response_body=None,
    )
