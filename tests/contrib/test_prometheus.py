"""Prometheus: the samples of a scrape, its queries, and several processes that are scraped as one."""

import asyncio
import os
import subprocess
import sys

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from prometheus_client import CollectorRegistry, generate_latest

from idempotency import Operation, signals
from idempotency.contrib.prometheus import exporter
from idempotency.contrib.prometheus.exporter import AVAILABLE, connect, metrics
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.models import MessageStatus
from tests.concurrency.failures import unreachable
from tests.contrib.conftest import happen
from tests.contrib.project import PROJECT
from tests.outbox import make_messages
from tests.records import MINUTE, make_records

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("_as_if_off")]


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    connect(registry)
    return registry


def scrape(registry):
    lines = generate_latest(registry).decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples if "_created" not in name}


def test_a_scrape_has_this_processs_events_and_the_tables_counts(registry):
    operation = Operation.declare("tests.scraped")
    happen(signals.claimed, operation, 2)
    happen(signals.replayed, operation)
    signals.purged.send(None, count=3)
    signals.unprotected.send(operation)
    make_records(2, Status.PARKED, operation="payouts.create", account_id="private-account")
    make_records(1, Status.IN_PROGRESS, lease=-5 * MINUTE, attempt=4, idempotency_key="private-key")
    make_messages(1, due=-MINUTE)
    make_messages(2, MessageStatus.DEAD)
    seen = scrape(registry)
    assert "private" not in "".join(seen)
    # An event of a known operation starts at 0, because Prometheus detects no increase in a series that starts at 1.
    zeros = [seen.pop(name) for name in list(seen) if name.startswith("idempotency_events_total") and not seen[name]]
    assert len(zeros) == len(signals.EVENTS) - 2
    assert {name: value for name, value in seen.items() if "seconds" not in name and "bytes" not in name} == {
        'idempotency_events_total{event="claimed",operation="tests.scraped"}': 2,
        'idempotency_events_total{event="replayed",operation="tests.scraped"}': 1,
        "idempotency_unprotected_requests_total": 1,
        "idempotency_purged_records_total": 3,
        "idempotency_relayed_messages_total": 0,
        "idempotency_dead_messages_total": 0,
        "idempotency_dead_letters_total": 0,
        "idempotency_stats_available": 1,
        'idempotency_records{status="in_progress"}': 1,
        'idempotency_records{status="completed"}': 0,
        'idempotency_records{status="recoverable"}': 0,
        'idempotency_records{status="parked"}': 2,
        'idempotency_parked_records{operation="payouts.create"}': 2,
        'idempotency_abandoned_claims{operation="charges.create"}': 1,
        "idempotency_most_attempts": 4,
        'idempotency_outbox_messages{status="pending"}': 1,
        'idempotency_outbox_messages{status="dead"}': 2,
    }
    assert seen["idempotency_overdue_seconds"] == pytest.approx(300, abs=30)
    assert seen["idempotency_outbox_oldest_due_seconds"] == pytest.approx(60, abs=30)
    assert ("idempotency_table_bytes" in seen) == (connection.vendor == "postgresql")


def test_connecting_reads_nothing_and_a_scrape_reads_each_table_once():
    registry = CollectorRegistry()
    with CaptureQueriesContext(connection) as captured:
        connect(registry)
        connect(registry)
    assert captured.captured_queries == []
    make_records(2, Status.PARKED)
    with CaptureQueriesContext(connection) as captured:
        scrape(registry)
    read = [one["sql"] for one in captured]
    assert len(read) == len(set(read))


def test_each_connected_registry_counts(registry):
    other = CollectorRegistry()
    connect(other)
    happen(signals.claimed, Operation("tests.scraped"))
    signals.purged.send(None, count=3)
    for one in (registry, other):
        seen = scrape(one)
        assert seen['idempotency_events_total{event="claimed",operation="tests.scraped"}'] == 1
        assert seen["idempotency_purged_records_total"] == 3


async def scrape_in_a_loop(registry):
    return scrape(registry)


@pytest.mark.parametrize(
    "scrape_without_tables",
    [scrape, lambda registry: asyncio.run(scrape_in_a_loop(registry))],
    ids=["the database refuses", "in the thread of an event loop"],
)
def test_counters_are_exported_even_if_the_tables_cannot_be_read(registry, scrape_without_tables):
    happen(signals.claimed, Operation.declare("tests.scraped"))
    with connection.execute_wrapper(unreachable):
        seen = scrape_without_tables(registry)
    assert seen['idempotency_events_total{event="claimed",operation="tests.scraped"}'] == 1
    assert {name: value for name, value in seen.items() if "_total" not in name} == {AVAILABLE: 0}


@pytest.mark.postgres
def test_a_scrape_does_not_wait_for_a_migration_that_has_locked_the_table(registry, monkeypatch):
    migrating = connection.copy()
    try:
        with migrating.cursor() as cursor, monkeypatch.context() as patch:
            cursor.execute(f"BEGIN; LOCK TABLE {IdempotencyRecord._meta.db_table} IN ACCESS EXCLUSIVE MODE")
            patch.setattr(exporter, "TIME_LIMIT", 0.05)
            assert scrape(registry)[AVAILABLE] == 0
    finally:
        migrating.close()
    assert scrape(registry)[AVAILABLE] == 1


def test_the_view_names_the_missing_app():
    with pytest.raises(ImproperlyConfigured, match=r"'idempotency\.contrib\.prometheus' to INSTALLED_APPS"):
        metrics(RequestFactory().get("/"))


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=new", "text/plain;version=1.x", ""])
def test_an_unreadable_accept_header_gets_plain_text(accept, settings, monkeypatch):
    monkeypatch.setattr(exporter, "connect", lambda: None)  # would register with the whole test process
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "idempotency.contrib.prometheus"]
    response = metrics(RequestFactory().get("/", headers={"Accept": accept}))
    assert (response.status_code, response["Content-Type"].partition(";")[0]) == (200, "text/plain")


def test_a_scraping_thread_keeps_no_connection(registry):
    connection.close()
    scrape(registry)
    assert connection.connection is None


SEVERAL_PROCESSES = """
import os

from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext

from idempotency import claim
from idempotency.contrib.prometheus.exporter import metrics

connection.close()
for key in ("a", "b"):
    if not os.fork():
        with claim("tests.forked", account_id="1", key=key) as run:
            run.result = None
        os._exit(0)
for _ in "ab":
    assert os.wait()[1] == 0
with CaptureQueriesContext(connection) as captured:
    response = metrics(RequestFactory().get("/metrics", headers={"Accept": "text/plain"}))
assert response["Content-Type"].startswith("text/plain"), response["Content-Type"]
assert len(captured) == len({one["sql"] for one in captured})
print(response.content.decode())
"""


@pytest.mark.once
def test_the_view_adds_up_all_processes_and_reads_the_tables_once(tmp_path):
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROJECT + SEVERAL_PROCESSES, "idempotency.contrib.prometheus"]
    lines = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True).splitlines()
    counted = [line for line in lines if line.startswith("idempotency_events_total{") and not line.endswith(" 0.0")]
    of = 'operation="tests.forked"'
    assert sorted(counted) == [
        f'idempotency_events_total{{event="{event}",{of}}} 2.0' for event in ("claimed", "completed")
    ]
    assert lines.count('idempotency_records{status="completed"} 2.0') == 1
    assert lines.count("idempotency_stats_available 1.0") == 1
