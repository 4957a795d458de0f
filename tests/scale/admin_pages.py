"""How long the admin's pages take over a large table, and how many buffers of the database they read."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.urls import reverse

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyCounter, IdempotencyRecord, OutboxMessage
from tests.benchmarks.instruments import NANOSECONDS, server_cpu
from tests.benchmarks.report import Table, milliseconds

from .filling import fill_to

#: Each page is asked for this often. The first time fills caches, and is shown by itself.
TIMES = 5
#: So many records are in each of the states that are not completed.
UNFINISHED = 200
RARE = "rare.operation"

_RECORDS = reverse("admin:idempotency_idempotencyrecord_changelist")
_MESSAGES = reverse("admin:idempotency_outboxmessage_changelist")

_LEAVE_UNFINISHED = """
UPDATE idempotency_record
SET status = %s, lease_expires_at = statement_timestamp() + %s * interval '1 hour'
WHERE id IN (SELECT id FROM idempotency_record WHERE id > %s AND status = 'completed' ORDER BY id LIMIT %s)
"""
_SEND_MESSAGES = """
INSERT INTO idempotency_outbox (message_id, account_id, idempotency_key, topic, sender, payload, headers,
    ordering_key, status, attempts, error, created_at, sent_at)
SELECT made, made, 'consumer.' || made, 'charge.created', 'testproject.senders.send', '{}', '{}', '', 'sent', 1, '',
    statement_timestamp() - interval '3 days', statement_timestamp() - interval '3 days'
FROM (SELECT gen_random_uuid() AS made FROM generate_series(1, %s)) AS messages
"""
_DEAD_MESSAGES = "UPDATE idempotency_outbox SET status = 'dead', sent_at = NULL WHERE id %% (%s / 100) = 0"


def compare(rows: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    fill_to(rows, progress)
    progress("admin: records in every state, and messages")
    _fill_states(rows)
    client = Client(headers={"host": "localhost"})
    client.force_login(get_user_model().objects.create_superuser(f"reader-{time.time_ns()}"))
    title = f"Pages of the admin over {rows:,} records and {rows // 10:,} messages"
    table = Table(title, ("page", "time", "CPU Python", "CPU server", "CPU server, first", "rows shown", "said"))
    for name, (url, query) in _pages(rows).items():
        progress(f"admin: {name}")
        table.add(name, *_measure(client, url, query))
    return [table]


def _fill_states(rows: int) -> None:
    """Leave some records of every age in each state, and a message for every tenth record."""
    with connection.cursor() as cursor:
        oldest = IdempotencyRecord.objects.earliest("id").pk
        for place, (status, lease) in enumerate(
            ((Status.IN_PROGRESS, 1), (Status.IN_PROGRESS, -1), (Status.RECOVERABLE, None), (Status.PARKED, None))
        ):
            cursor.execute(_LEAVE_UNFINISHED, [status, lease, oldest + place * rows // 4, UNFINISHED])
        cursor.execute(_SEND_MESSAGES, [rows // 10])
        cursor.execute(_DEAD_MESSAGES, [max(rows // 10, 100)])
        cursor.execute("VACUUM (ANALYZE)")
    for operation in ("charges.create", RARE):
        IdempotencyCounter.objects.get_or_create(operation=operation, event="claimed", defaults={"total": 1})
    record = IdempotencyRecord.objects.completed()[rows // 2]
    IdempotencyRecord.objects.filter(pk=record.pk).update(operation=RARE)


def _pages(rows: int) -> dict[str, tuple[str, dict[str, Any]]]:
    record = IdempotencyRecord.objects.completed()[rows // 3]
    parked = IdempotencyRecord.objects.parked()[UNFINISHED // 2]
    message = OutboxMessage.objects.all()[rows // 20]
    searches = {
        "an account": record.account_id,
        "an account and a key": f"{record.account_id} {record.idempotency_key}",
        "a key": record.idempotency_key,
        "a key of a parked record": parked.idempotency_key,
        "a key that there isn't": "00000000-0000-4000-8000-000000000000",
        "the beginning of a key": record.idempotency_key[:12],
    }
    states = ("live", "abandoned", "completed", "recoverable", "parked", "past_retention")
    return {
        "records": (_RECORDS, {}),
        "records, last page": (_RECORDS, {"p": min(100, max(1, rows // 100))}),
        "records by retention": (_RECORDS, {"o": "4"}),
        **{f"search: {name}": (_RECORDS, {"q": term}) for name, term in searches.items()},
        **{f"state: {state}": (_RECORDS, {"state": state}) for state in states},
        "operation": (_RECORDS, {"operation": "charges.create"}),
        "operation of one old record": (_RECORDS, {"operation": RARE}),
        "operation, parked": (_RECORDS, {"operation": "charges.create", "state": "parked"}),
        "dashboard": (reverse("admin:idempotency_dashboard"), {}),
        "a record": (reverse("admin:idempotency_idempotencyrecord_change", args=[record.pk]), {}),
        "messages": (_MESSAGES, {}),
        **{f"messages: {state}": (_MESSAGES, {"state": state}) for state in ("due", "waiting", "dead", "sent")},
        "messages, search": (_MESSAGES, {"q": str(message.message_id)}),
        "a message": (reverse("admin:idempotency_outboxmessage_change", args=[message.pk]), {}),
    }


_SAID = re.compile(r'<li class="(?:info|success|warning|error)">(.*?)</li>')


def _measure(client: Client, url: str, query: dict[str, Any]) -> tuple[str, ...]:
    seconds: list[float] = []
    python: list[float] = []
    server: list[int] = []
    for _ in range(1 + TIMES):
        start, cpu, of_server = time.perf_counter(), time.thread_time(), server_cpu() or 0
        response: Any = client.get(url, query)
        seconds.append(time.perf_counter() - start)
        python.append(time.thread_time() - cpu)
        server.append((server_cpu() or 0) - of_server)
        assert response.status_code == 200, response
    shown = (getattr(response, "context_data", None) or {}).get("cl")
    return (
        milliseconds(statistics.median(seconds[1:])),
        milliseconds(statistics.median(python[1:])),
        milliseconds(statistics.median(server[1:]) / NANOSECONDS),
        milliseconds(server[0] / NANOSECONDS),
        "–" if shown is None else f"{len(shown.result_list):,} of {shown.result_count:,}",
        " ".join(_SAID.findall(response.content.decode())),
    )
