"""The dashboard: its numbers, stuck rows with their possible decisions, and permissions."""

import json
import re
from unittest.mock import Mock

import pytest
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.db import OperationalError, connection
from django.urls import path

from idempotency import signals
from idempotency.admin.display import format_duration
from idempotency.admin.records import IdempotencyRecordAdmin
from idempotency.contrib.dashboard.admin import DashboardAdmin
from idempotency.contrib.dashboard.counting import HOURS_KEPT, counters, this_hour, write_counts
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_batches
from idempotency.outbox.admin import OutboxMessageAdmin
from idempotency.outbox.models import MessageStatus, OutboxMessage
from tests.database.counters.conftest import _nothing_counted  # noqa: F401 - a fixture
from tests.database.counters.counting import count
from tests.http.admin.pages import DASHBOARD, LIST, decide, detail, log_in, plain_text
from tests.outbox import make_messages
from tests.records import HOUR, MINUTE, make_records
from tests.tables import drop, drop_field, whole_tables  # noqa: F401 - a fixture

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


def rows(page):
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page.content.decode(), re.DOTALL)
    return {
        plain_text(head): [plain_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells, re.DOTALL)]
        for head, cells in found
    }


def write(event, hours_ago, total, operation="charges.create"):
    IdempotencyCounter.objects.create(hour=this_hour() - hours_ago, operation=operation, event=event, total=total)


def test_the_dashboard_counts_the_last_day_by_event_and_operation(client):
    write("claimed", 1, 10)
    write("claimed", 2, 1000)
    write("claimed", 24, 10_000, "payouts.create")
    write("claimed", 25, 1_000_000)  # more than a day ago
    write("replayed", 0, 5)
    count(3, signals.replayed)
    counters.flush()
    page = log_in(client, superuser=True).get(DASHBOARD)
    seen = rows(page)
    assert seen["executions"] == ["11,010"]
    assert seen["replays"] == ["8"]
    assert seen["failures"] == ["0"]
    assert [seen["charges.create"][:2], seen["payouts.create"][:2]] == [["1,010", "5"], ["10,000", "0"]]
    assert seen["tests.counters"][:2] == ["0", "3"]
    assert list(seen).index("payouts.create") < list(seen).index("charges.create")  # the busiest first
    data = json.loads(re.search(r'<script id="idempotency-chart-data"[^>]*>(.*?)</script>', page.content.decode())[1])
    assert (len(data["hours"]), data["hours"][-1]) == (25, this_hour() * 3600)
    assert dict(data["series"])["executions"] == [10_000, *[0] * 21, 1000, 10, 0]


@pytest.mark.parametrize(("hours", "is_marked"), [(23, False), (25, True)])
def test_a_purge_that_is_overdue_for_more_than_a_day_is_marked(client, hours, is_marked):
    log_in(client, superuser=True)
    make_records(1, expires=-hours * HOUR)
    page = client.get(DASHBOARD)
    assert rows(page)["purge overdue for"] == [format_duration(hours * HOUR)]
    assert ('<span class="idempotency-state idempotency-waiting">' in page.content.decode()) is is_marked
    next(purge_batches())
    assert rows(client.get(DASHBOARD))["purge overdue for"] == [format_duration(0 * HOUR)]


def test_the_first_count_of_an_hour_deletes_counts_past_their_retention():
    write("claimed", HOURS_KEPT + 1, 1)
    write("claimed", HOURS_KEPT, 2)
    IdempotencyCounter.objects.create(operation="charges.create", event="claimed", total=3)
    write_counts("default", {("charges.create", "claimed"): 4}, this_hour())
    kept = IdempotencyCounter.objects.filter(event="claimed").order_by("total").values_list("total", flat=True)
    assert list(kept) == [2, 4, 7]
    assert counters.read("default") == {"charges.create": {"claimed": 7}}


def test_stuck_rows_are_one_click_away_from_their_decision(client):
    (parked,) = make_records(1, Status.PARKED, expires=HOUR)
    make_records(1, Status.PARKED, operation="payouts.create")
    make_records(1, Status.IN_PROGRESS, lease=-10 * MINUTE)
    make_messages(1, MessageStatus.DEAD)
    make_messages(1, due=-10 * MINUTE)
    page = log_in(client, superuser=True).get(DASHBOARD)
    text = plain_text(page.content.decode())
    alarms = [text.index(alarm) for alarm in ("no sweep is running", "no relay is running")]
    assert max(alarms) < text.index("Stuck") < text.index("Events")
    assert re.search(
        r"parked key-\d+ charges.create account 1 \d+ s Decide Record an outcome… Mark as not executed…", text
    )
    assert "payouts.create: 1" in text
    assert f'href="{LIST}?state=parked&amp;operation=payouts.create"' in page.content.decode()
    assert text.count("Mark as not executed…") == 2
    assert text.count("Release…") == 3
    assert text.count("Requeue…") == 1
    assert rows(page)["messages that are not sent"] == ["1"]
    question = client.post(LIST, {"action": "mark_not_executed", "_selected_action": [parked], "came_from": "page"})
    assert decide(client, question, reason="asked the bank")
    assert IdempotencyRecord.objects.get(pk=parked).status == Status.RECOVERABLE


def test_a_dashboard_without_stuck_rows_has_no_alarm(client):
    make_records(1, Status.IN_PROGRESS, lease=MINUTE)
    make_messages(1)
    text = plain_text(log_in(client, superuser=True).get(DASHBOARD).content.decode())
    assert "Stuck Nothing is stuck. Events" in text
    assert [alarm for alarm in ("no sweep", "no relay", "Parked", "Dead", "Decide") if alarm in text] == []


def test_a_viewer_of_records_sees_no_messages_and_no_decisions(client):
    make_records(1, Status.PARKED)
    make_messages(1, MessageStatus.DEAD)
    page = log_in(client, "view_idempotencyrecord").get(DASHBOARD)
    text = plain_text(page.content.decode())
    assert "charges.create" in text
    assert not [one for one in ("Dead messages", "The outbox", "Decide") if one in text]
    assert f'href="{DASHBOARD}"' in client.get(LIST).content.decode()


office, _, with_others = SITES = [AdminSite(name=name) for name in ("office", "without", "others")]
for site in SITES:
    site.register(IdempotencyRecord, IdempotencyRecordAdmin)
    site.register(IdempotencyCounter, DashboardAdmin)
office.register(OutboxMessage, OutboxMessageAdmin)
with_others.register(OutboxMessage)
urlpatterns = [path(f"{site.name}/", site.urls) for site in (admin.site, *SITES)]


MODELS = [IdempotencyRecord, OutboxMessage, IdempotencyStep, IdempotencyCounter]
own = AdminSite(name="own")
own.register(MODELS)
urlpatterns.append(path("own/", own.urls))


@pytest.mark.urls(__name__)
@pytest.mark.parametrize("model", MODELS)
def test_an_admin_of_the_project_shows_its_own_pages(client, model):
    (record,) = make_records(1)
    make_messages(1)
    IdempotencyStep.objects.create(record_id=record, account_id="1", name="a", result="{}")
    write("claimed", 0, 1)
    row, staff = model._default_manager.first(), log_in(client, superuser=True)
    address = f"/own/{model._meta.app_label}/{model._meta.model_name}/"
    for url in (address, f"{address}{row.pk}/change/", f"{address}add/", f"{address}{row.pk}/delete/"):
        page = staff.get(url)
        assert page.status_code == 200
        assert [one.name for one in page.templates if one.name and one.name.startswith("idempotency/")] == []


@pytest.mark.urls(__name__)
def test_each_admin_site_has_a_dashboard(client):
    make_records(1, Status.PARKED, idempotency_key="<i>", account_id="<i>", operation="<i>")
    make_messages(1, MessageStatus.DEAD)
    log_in(client, superuser=True)
    for site in SITES:
        shown = client.get(f"/{site.name}/idempotency_dashboard/idempotencycounter/").content.decode()
        links = re.findall(r'(?:href|action)="/(\w+)/', shown[shown.index("idempotency-grid") :])
        assert set(links) == {site.name}
        assert ("Dead messages" in shown) is (site is office)
        assert "<i>" not in shown


@pytest.mark.parametrize("permissions", [[], ["view_outboxmessage", "view_response_body"]])
def test_the_dashboard_needs_the_permission_to_view_records(client, permissions):
    assert log_in(client, *permissions).get(DASHBOARD).status_code == 403


@pytest.mark.usefixtures("whole_tables")
@pytest.mark.except_citus  # the tables that it creates again are not distributed
@pytest.mark.parametrize("atomic", [False, True])
def test_the_admin_answers_with_the_logs_sentence_about_broken_tables(client, monkeypatch, atomic):
    log_in(client, superuser=True)
    (pk,) = make_records(1)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", atomic)
    for break_table, arguments, pages in (
        (drop, [IdempotencyStep], [detail(pk)]),
        (drop_field, [IdempotencyRecord, "error"], [detail(pk)]),
        (drop, [IdempotencyRecord], [detail(pk), LIST, DASHBOARD]),
    ):
        with connection.schema_editor() as editor:
            break_table(editor, *arguments)
        for page in pages:
            answer = client.get(page)
            assert answer.status_code == 503, page
            assert answer.content.decode().startswith("Every protected operation fails: the tables of idempotency")


def test_another_database_error_in_the_admin_stays_an_error(client, monkeypatch):
    log_in(client, superuser=True)
    failing = Mock(side_effect=OperationalError("the server is down"))
    monkeypatch.setattr("idempotency.contrib.dashboard.admin.stats", failing)
    with pytest.raises(OperationalError, match="the server is down"):
        client.get(DASHBOARD)
