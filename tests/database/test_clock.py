"""Times are by the database's clock, regardless of the zone of its session, its settings and the project.

A zone that changes its hour is simulated by another offset of the session.
"""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, connections
from django.utils.timezone import now

from idempotency.exceptions import InProgressError
from idempotency.http.key_status import key_statuses
from idempotency.models import IdempotencyRecord
from idempotency.operate.statistics import stats
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.relay import relay_once
from idempotency.outcome import Outcome
from idempotency.protocol import ownership
from idempotency.protocol.ownership import Ownership
from idempotency.store import store_for
from tests.database.claiming import acquire, again
from tests.database.statements import execute
from tests.outbox import make_messages
from tests.records import MINUTE, make_records

pytestmark = pytest.mark.django_db(transaction=True)

WINTER, SUMMER = 5, 6


def set_offset(hours):
    """Change the session's zone, except on SQLite, which has none, and PostgreSQL, where Django relies on it."""
    if connection.vendor == "mysql":
        connection.cursor().execute(f"SET time_zone = '+{hours}:00'")


@pytest.fixture
def _another_zone():
    set_offset(WINTER)
    yield
    connection.close()  # the next test gets another session


@pytest.fixture(params=["UTC", "a project's zone", "a database's zone", "no zones"])
def _zones(request, settings):
    """The zones that settings may name."""
    if request.param == "a database's zone":
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(connection.settings_dict, "TIME_ZONE", "Asia/Kolkata")
            forget_zone()
            yield
        forget_zone()
        return
    if request.param != "UTC":
        settings.TIME_ZONE = "Asia/Kolkata"
        settings.USE_TZ = request.param != "no zones"
    yield
    connection.close()


def forget_zone():
    """Django keeps a connection's zone, and PostgreSQL's session has it."""
    for name in ("timezone", "timezone_name"):
        vars(connections["default"]).pop(name, None)
    connection.close()


def times():
    """All times in the tables that are not in the future by declaration."""
    (record,), (message,) = IdempotencyRecord.objects.all(), OutboxMessage.objects.all()
    return [record.created_at, record.completed_at, message.created_at, message.next_try_at, message.sent_at]


@pytest.mark.usefixtures("_zones", "_another_zone")
def test_every_time_is_the_projects_now():
    """It has the type and the zone of Django's ``now()``, so a project can compare the two."""
    owned = acquire(again)
    ownership.release(owned)
    ownership.record(acquire(again), Outcome(201, (), "{}"))
    make_messages(1)
    relay_once()
    record = IdempotencyRecord.objects.get()
    ends = record.expires_at - again.policy.retention
    assert all(abs(moment - now()) < MINUTE for moment in [*times(), ends])
    told = key_statuses({owned.scope: again.policy})[owned.scope]
    assert abs(told.created_at.astimezone(UTC) - datetime.now(UTC)) < MINUTE
    assert stats().oldest_in_progress.value is None
    # What is read can be written and searched for.
    record.save(update_fields=["created_at", "completed_at", "expires_at"])
    same = IdempotencyRecord.objects.filter(created_at=record.created_at, expires_at__gt=now())
    assert (same.get().created_at, same.get().expires_at) == (record.created_at, record.expires_at)
    assert {entry["event"] for entry in record.history} == {"released", "taken_over"}


@pytest.mark.postgres
@pytest.mark.usefixtures("_zones")
def test_a_query_by_a_time_does_not_depend_on_the_zone_of_the_session():
    """Which on a worker of Citus isn't the coordinator's. The purge and the sweep query from the last batch's time."""
    make_records(1)
    record = IdempotencyRecord.objects.get()
    execute("SET TIME ZONE 'America/Lima'")
    assert IdempotencyRecord.objects.filter(created_at=record.created_at, expires_at__lte=record.expires_at).exists()
    record.save(update_fields=["created_at"])
    connection.close()  # the next session has the zone that Django relies on
    assert IdempotencyRecord.objects.get().created_at == record.created_at


@pytest.mark.failure_113
@pytest.mark.usefixtures("_zones", "_another_zone")
def test_a_lease_lasts_while_the_clock_of_the_session_changes_its_hour():
    owner = acquire(again)
    left = store_for("default").read(owner.scope).lease_left
    for offset in (SUMMER, WINTER):
        set_offset(offset)
        with pytest.raises(InProgressError):
            acquire(again)
        assert abs(store_for("default").read(owner.scope).lease_left - left) < 30
        assert ownership.postpone(owner, again.policy.lease)


@pytest.mark.failure_113
@pytest.mark.usefixtures("_another_zone")
def test_a_dead_key_is_free_when_its_lease_ends_in_another_hour():
    owner = acquire(again)
    assert ownership.postpone(owner, timedelta(seconds=-1))
    set_offset(WINTER - 1)
    assert isinstance(acquire(again), Ownership)
