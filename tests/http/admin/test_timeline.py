"""The timeline on a record's page: the order of its events, its permissions and its limits."""

import re
from datetime import UTC, datetime
from unittest.mock import Mock
from zoneinfo import ZoneInfo

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency import REEXECUTE, Operation, claim, current_claim
from idempotency.admin import timeline
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.resolutions import release
from idempotency.outbox import publish
from idempotency.outbox.models import MessageStatus, OutboxMessage
from idempotency.store import statement_timeout
from tests.database.statements import explaining, fill, fill_outbox
from tests.http.admin.pages import detail, log_in, plain_text, text
from tests.outbox import SENDER
from tests.records import HOUR, MINUTE, from_now, make_records

pytestmark = pytest.mark.django_db

order = Operation.declare("tests.timeline.order", transaction=False, recovery=REEXECUTE)
receipt = Operation.declare("tests.timeline.receipt")

MISSING = "Some messages or consumers may be missing"
EVERYTHING = ("view_idempotencyrecord", "view_response_body", "view_outboxmessage")


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """The test machine may be busy."""
    monkeypatch.setattr(statement_timeout, "LIMIT", 60)


def lines(client, pk):
    """The lines of the timeline on a record's page."""
    page = client.get(detail(pk)).content.decode()
    shown = page.partition('<div class="idempotency-timeline">')[2].partition("</table>")[0]
    rows = [plain_text(row) for row in re.findall("<tr>(.*?)</tr>", shown)[1:]]
    return [re.sub(r"^[-0-9]{10} [:0-9]{8} [-+][0-9.]+ [a-z]+( \d+ [a-z]+)? ", "", row) for row in rows]


def live(*, fails):
    try:
        with claim(order, account_id="1", key="k") as run:
            current_claim().step("charge", lambda: 1)
            if fails:
                raise ValueError("no such customer")
            with transaction.atomic():
                publish("receipts.send", {"order": 1}, sender=SENDER)
            run.result = None
    except ValueError:
        pass
    return IdempotencyRecord.objects.get(operation=order.name)


def test_the_timeline_of_a_record_is_in_order(client):
    release_by = User.objects.create(username="olga")
    record = live(fails=True)
    IdempotencyRecord.objects.update(status=Status.PARKED)
    release(IdempotencyRecord.objects.get(), by=release_by, reason="confirmed with the bank")
    live(fails=False)
    with claim(receipt, account_id="1", key=OutboxMessage.objects.get().idempotency_key) as run:
        run.result = None
    # Each event gets a distinct time. The admin's log uses this machine's clock. The rows use the database's, which may
    # round to milliseconds.
    LogEntry.objects.update(action_time=from_now(-7 * MINUTE))
    IdempotencyStep.objects.update(created_at=from_now(-8 * MINUTE))
    messages_at = {"created_at": from_now(-6 * MINUTE), "sent_at": from_now(-4 * MINUTE)}
    OutboxMessage.objects.update(status=MessageStatus.SENT, **messages_at)
    for operation, claimed, completed in ((order, 9, 5), (receipt, 3, 2)):
        times = {"created_at": from_now(-claimed * MINUTE), "completed_at": from_now(-completed * MINUTE)}
        IdempotencyRecord.objects.filter(operation=operation.name).update(**times)
    record.refresh_from_db()
    for entry, minutes in zip(record.history, (7.5, 6.5), strict=True):
        entry["at"] = (datetime.now(UTC) - minutes * MINUTE).isoformat()
    record.save(update_fields=["history"])
    log_in(client, *EVERYTHING)
    assert lines(client, record.pk) == [
        "The request was claimed for the first time.",
        "The result of step “charge” was stored.",
        "Attempt 1 failed and was released, so that a retry runs: ValueError",
        "olga: released: confirmed with the bank",
        "Attempt 2 began. The previous one was released, or its lease was over.",
        "Message to “receipts.send” published; now sent.",
        "Attempt 2 was completed with status 200.",
        "Message to “receipts.send” confirmed by its broker.",
        "A consumer, tests.timeline.receipt, claimed a message; now completed.",
        "The retention ends.",
    ]
    consumed = lines(client, IdempotencyRecord.objects.get(operation=receipt.name).pk)
    assert [line.partition("”")[2] or line for line in consumed] == [
        " published; now sent.",
        " confirmed by its broker.",
        "The request was claimed for the first time.",
        "Attempt 1 was completed with status 200.",
        "The retention ends.",
    ]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"status": Status.IN_PROGRESS, "lease": MINUTE}, "The lease of attempt 1 ends, unless it is renewed."),
        ({"status": Status.IN_PROGRESS, "lease": -MINUTE}, "The lease of attempt 1 ended without an outcome."),
        ({"status": "sealed"}, "The request was claimed for the first time."),
    ],
)
def test_the_end_of_the_lease_is_listed(client, fields, end):
    (pk,) = make_records(1, expires=HOUR, created_at=from_now(-2 * HOUR), **fields)
    log_in(client, "view_idempotencyrecord")
    assert lines(client, pk)[-2:] == [end, "The retention ends."]
    IdempotencyRecord.objects.update(expires_at=from_now(-HOUR))
    assert "The retention ended." in lines(client, pk)


def test_messages_and_errors_are_queried_only_with_the_permission(client):
    log_in(client, "view_idempotencyrecord")
    record = live(fails=True)
    live(fails=False)
    with CaptureQueriesContext(connection) as captured:
        seen = lines(client, record.pk)
    assert not [line for line in seen if "receipts" in line or "customer" in line]
    assert not [one for one in captured if "idempotency_outbox_message" in one["sql"]]


def test_a_long_list_is_cut_and_a_slow_outbox_query_is_abandoned(client, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_ROWS", 2)
    log_in(client, *EVERYTHING)
    record = live(fails=False)
    for name in "abc":
        IdempotencyStep.objects.create(account_id="1", record_id=record.pk, name=name, result="1")
    assert len([line for line in lines(client, record.pk) if "step" in line]) == 2
    assert "Only 2 of its steps are listed." in text(client.get(detail(record.pk)))
    assert "receipts.send" in text(client.get(detail(record.pk)))
    monkeypatch.setattr(statement_timeout, "LIMIT", 0)
    page = text(client.get(detail(record.pk)))
    assert ("Message to" in page, MISSING in page) == (False, True)
    monkeypatch.setattr(statement_timeout, "LIMIT", 60)
    monkeypatch.setattr("idempotency.outbox.timeline._consumed", Mock(side_effect=statement_timeout.OutOfTimeError))
    page = text(client.get(detail(record.pk)))
    assert ("Message to" in page, MISSING in page) == (True, True)


def test_the_timeline_names_the_time_zone_of_its_times(client):
    (pk,) = make_records(1, created_at=datetime(2026, 7, 1, 12, tzinfo=UTC), expires=HOUR)
    log_in(client, "view_idempotencyrecord")
    with timezone.override("Europe/Berlin"):
        page = text(client.get(detail(pk)))
    assert "2026-07-01 14:00:00 +0.000 s" in page
    assert "Times are in the time zone Europe/Berlin." in page


@pytest.mark.postgres
@pytest.mark.except_citus  # which can't ANALYZE a table in the transaction that has filled it
def test_no_large_table_is_read_without_an_index(client):
    log_in(client, *EVERYTHING)
    record = live(fails=False)
    fill(5_000)
    fill_outbox(5_000)
    connection.cursor().execute(
        "INSERT INTO idempotency_step (account_id, record_id, name, result, created_at) "
        "SELECT '1', number, 'a', '1', statement_timestamp() FROM generate_series(1000, 6000) AS number"
    )
    with explaining("idempotency_") as plans:
        lines(client, record.pk)
    read = [plan for plan in plans if "idempotency_dashboard_counter" not in plan]
    assert len([plan for plan in read if "idempotency_outbox_message" in plan]) >= 2
    assert [plan for plan in read if "Seq Scan on idempotency_" in plan] == []


@pytest.mark.parametrize("text", ["2026-11-26T15:00:00.5+00:00", "2026-11-26 15:00:00.5"])
@pytest.mark.parametrize("aware", [True, False], ids=["aware", "naive"])
def test_a_history_entry_has_the_same_time_format_as_other_events(text, aware, settings):
    """PostgreSQL writes the zone into JSON, other databases don't; and USE_TZ may be off."""
    settings.USE_TZ, settings.TIME_ZONE = aware, "Asia/Tokyo"
    moment = datetime(2026, 11, 26, 15, 0, 0, 500_000, tzinfo=UTC)
    assert timeline._time_of({"at": text}) == (moment if aware else timezone.make_naive(moment, ZoneInfo("Asia/Tokyo")))
