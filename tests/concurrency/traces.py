"""Reads the record and the effects, and moves the clock by back-dating the record."""

from django.db import connection

from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import reopen_claim
from tests.records import HOUR, from_now


def record(key="k"):
    return IdempotencyRecord.objects.get(idempotency_key=key)


def state():
    """The one record's status, and the effects."""
    return record().status, effects()


def rows(statement, *parameters):
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall()


def session_settings(*names):
    """PostgreSQL's values of these settings, on this thread's connection."""
    return [rows(f"SHOW {name}")[0][0] for name in names]


def is_replay(answer, of):
    """Whether a response is the replay of another one."""
    return (answer.status_code, answer.content, answer.get("Idempotency-Replayed")) == (201, of.content, "true")


def effects():
    return sorted(Transfer.objects.values_list("label", flat=True))


def end_lease(key="k"):
    """Move the database's clock past the lease, by back-dating the record."""
    claims = IdempotencyRecord.objects.filter(idempotency_key=key)
    assert claims.update(lease_expires_at=from_now(-HOUR)) == 1


def end_retention():
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))


def abandon():
    """Leave the record and the effects as a kill between the claim's commit and the business commit does."""
    Transfer.objects.all().delete()
    reopen_claim(lease=HOUR)
