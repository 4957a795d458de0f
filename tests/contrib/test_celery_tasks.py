"""The Celery tasks: bounded, found by autodiscovery, and of use in a worker that has loaded no view. Scenario 29."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.conf import settings

from idempotency import Operation
from idempotency.contrib.celery import tasks
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.models import MessageStatus
from tests.database import processes
from tests.outbox import broker, make_messages
from tests.records import HOUR, MINUTE, database_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)

again = Operation("tests.tasks.reexecute")


def abandon(count: int = 1, operation: str = again.name, **fields: Any) -> list[int]:
    return make_records(count, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR, operation=operation, **fields)


def states() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for name, status in IdempotencyRecord.objects.values_list("operation", "status"):
        found.setdefault(name, Counter())[status] += 1
    return found


#: What each task is asked to do, and what it returns when it is done and when it has to stop after two batches.
RUNS = {
    "recover": (
        lambda: (abandon(7), abandon(2, "tests.tasks.unknown")),
        tasks.recover_expired_leases,
        {"recoverable": 7, "completed": 0, "parked": 0, "postponed": 0}
        | {"unknown_operations": {"tests.tasks.unknown": 2}, "exhausted": True},
        {"recoverable": 6, "unknown_operations": {}},
    ),
    "purge": (
        lambda: (make_records(7), make_records(1, Status.PARKED, expires=-MINUTE), make_records(1, expires=HOUR)),
        tasks.purge_expired_records,
        {"deleted": 7, "bodies": 0, "messages": 0, "exhausted": True},
        {"deleted": 6},
    ),
    "purge of messages": (
        lambda: make_messages(7, MessageStatus.SENT, sent=-96 * HOUR),
        tasks.purge_expired_records,
        {"deleted": 0, "bodies": 0, "messages": 7, "exhausted": True},
        {"messages": 6},
    ),
    "purge of responses": (
        lambda: make_records(7, expires=HOUR, body_expires_at=database_now() - HOUR),
        tasks.purge_expired_records,
        {"deleted": 0, "bodies": 7, "messages": 0, "exhausted": True},
        {"bodies": 6},
    ),
    "relay": (
        lambda: (make_messages(7), make_messages(1, sender="tests.outbox.removed", due=timedelta(0))),
        tasks.relay_outbox,
        {"sent": 7, "postponed": 1, "dead": 0, "put_back": 0, "unavailable": {}, "exhausted": True},
        {"sent": 6, "postponed": 0},
    ),
}


@pytest.mark.parametrize(("make", "task", "done", "stopped"), RUNS.values(), ids=RUNS)
def test_a_run_takes_batch_after_batch_up_to_a_bound_and_returns_plain_data(
    make: Callable[[], object], task: Callable[..., Any], done: dict[str, Any], stopped: dict[str, Any]
) -> None:
    broker.reset()
    make()
    counts = task(batch_size=3)
    assert json.loads(json.dumps(counts)) == counts == done
    make()
    assert task(batch_size=3, max_batches=2) == done | stopped | {"exhausted": False}
    assert tasks.MAX_BATCHES > 1


def test_a_relay_ends_by_itself_before_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the limit cuts off is sent again, so no batch may begin that it could cut off."""
    broker.reset()
    make_messages(7)
    monkeypatch.setattr(tasks, "TIME_LIMIT", 0)
    counts = tasks.relay_outbox(batch_size=3)
    assert (counts["sent"], counts["exhausted"]) == (3, False)


def test_the_tasks_bear_the_names_that_a_schedule_names() -> None:
    for name in ("recover_expired_leases", "purge_expired_records", "relay_outbox"):
        task = getattr(tasks, name)
        assert task.name == f"idempotency.contrib.celery.tasks.{name}"
        # The next run does what a lost one left, so nothing has to come back from a worker that died.
        assert task.acks_late is False
        assert task.time_limit == tasks.TIME_LIMIT
        assert task.soft_time_limit is None


# A worker that has loaded no view

#: An app of a project's, that declares its operations where they are discovered, and a settings module that has it.
OPERATIONS = """
from idempotency import PARK, Completed, Operation, Reconcile
Operation("shop.reexecute")
Operation("shop.park", transaction=False, recovery=PARK)
Operation("shop.reconcile", transaction=False, recovery=Reconcile(lambda record: Completed({"id": record.pk})))
"""
SETTINGS = """
from testproject.settings import *
INSTALLED_APPS = [*INSTALLED_APPS, "shop"]
ROOT_URLCONF = "shop.urls_that_no_worker_may_import"
"""
CELERY_APP = """
import json, os
from celery import Celery
app = Celery("shop", broker="filesystem://", backend=os.environ["RESULTS"])
app.conf.broker_transport_options = json.loads(os.environ["TRANSPORT"])
app.conf.broker_connection_retry_on_startup = True
app.autodiscover_tasks()
"""


FOUND = {"recoverable": 2, "completed": 2, "parked": 2, "postponed": 0} | {
    "unknown_operations": {"of.another.project": 2},
    "exhausted": True,
}
SETTLED = {
    "shop.reexecute": {"recoverable": 2},
    "shop.park": {"parked": 2},
    "shop.reconcile": {"completed": 2},
    "of.another.project": {"in_progress": 2},
}


@pytest.mark.once
@pytest.mark.scenario_29
def test_a_celery_worker_recovers_what_it_knows_and_reports_the_rest(tmp_path: Path) -> None:
    for name in SETTLED:
        abandon(2, name)
    package, here = tmp_path / "shop", tmp_path / "broker"
    package.mkdir()
    for name, text in {"__init__": "", "operations": OPERATIONS, "settings": SETTINGS, "celery": CELERY_APP}.items():
        (package / f"{name}.py").write_text(text)
    (here / "results").mkdir(parents=True)
    transport: dict[str, object] = dict.fromkeys(("data_folder_in", "data_folder_out"), str(here))
    transport |= {"control_folder": str(here / "control"), "polling_interval": 0.1}
    environment = {
        **processes.environment(),
        "PYTHONPATH": f"{tmp_path}:{settings.BASE_DIR}",
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "RESULTS": f"file://{here}/results",
        "TRANSPORT": json.dumps(transport),
        "CELERY_SKIP_CHECKS": "true",  # else a worker runs Django's when it starts, which load the URLconf
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "shop.celery", "worker", "--pool", "solo", "--loglevel", "WARNING"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        # By its name, as a schedule sends it.
        with Celery("asking", broker="filesystem://", backend=environment["RESULTS"], set_as_current=False) as asking:
            asking.conf.broker_transport_options = transport
            found = asking.send_task("idempotency.contrib.celery.tasks.recover_expired_leases").get(
                timeout=60, interval=0.1
            )
    finally:
        worker.terminate()
        log, _ = worker.communicate(timeout=60)
    assert found == FOUND, log
    assert "2 abandoned claim(s) of operation 'of.another.project' are left alone" in log
    assert states() == SETTLED
