"""Records in every state, with times set by the database's clock."""

import itertools
from datetime import timedelta

from django.contrib.contenttypes.models import ContentType
from django.db.models import ExpressionWrapper, Value

from idempotency.identity.fingerprint import Payload
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, Now, RecordQuerySet, UTCDateTimeField
from idempotency.operate.purge import purge_body_batches

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)

_numbers = itertools.count()


def from_now(duration):
    """The database's time, ``duration`` from now."""
    return ExpressionWrapper(Now() + Value(duration), output_field=UTCDateTimeField())


def database_now():
    """The database's time, read from a row that ``migrate`` created."""
    return ContentType.objects.values_list(from_now(timedelta(0)), flat=True)[0]


def make_records(count=1, status=Status.COMPLETED, *, expires=-HOUR, lease=None, **fields):
    """Insert ``count`` records and return their ids, the first to expire first.

    The last one expires ``expires`` from now, and each of the others a millisecond before the next one.
    """
    now = database_now()  # read once, because thousands of expressions take seconds
    values = {
        "account_id": "1",
        "operation": "charges.create",
        "request_hash": Payload("another").request_hash,
        "status": status,
        "lease_expires_at": None if lease is None else now + lease,
        **fields,
    }
    if status is Status.COMPLETED:
        values = {"response_status": 201, "response_headers": [], "response_body": "{}", "completed_at": now} | values
    numbered = [{"idempotency_key": f"key-{next(_numbers)}"} | values for _ in range(count)]
    records = IdempotencyRecord.objects.bulk_create(
        IdempotencyRecord(expires_at=now + expires - timedelta(milliseconds=count - 1 - place), **one)
        for place, one in enumerate(numbered)
    )
    return [record.pk for record in records]


def abandon(count=1, operation="charges.create", **fields):
    """Insert claims whose lease ended an hour ago."""
    name = operation if isinstance(operation, str) else operation.name
    return make_records(count, Status.IN_PROGRESS, **{"expires": HOUR, "lease": -HOUR, "operation": name} | fields)


def make_bodies(count=1, *, due=HOUR, **fields):
    """Insert completed records whose responses, but not the records, are due for a purge."""
    return make_records(count, expires=HOUR, body_expires_at=database_now() - due, **fields)


def purge_body_of(key):
    """Purge the response of the record of ``key``, as after ``body_retention``."""
    completed = RecordQuerySet(IdempotencyRecord).completed().filter(idempotency_key=key)
    assert completed.update(body_expires_at=from_now(-HOUR)) == 1
    assert sum(batch.deleted for batch in purge_body_batches()) == 1


def expire(*ids):
    """Back-date the end of the records' retention by an hour, and the end of their leases."""
    records = IdempotencyRecord.objects.filter(pk__in=ids)
    records.update(expires_at=from_now(-HOUR))
    records.exclude(lease_expires_at=None).update(lease_expires_at=from_now(-HOUR))


def remaining():
    return set(IdempotencyRecord.objects.values_list("pk", flat=True))
