"""The Celery tasks: bounded, found by autodiscovery, and of use in a worker that has loaded no view. Scenario 29."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from idempotency import Operation
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, MessageStatus
from tests.database import processes
from tests.outbox import broker, make_messages
from tests.records import HOUR, make_records, remaining

pytest.importorskip("celery", reason="the tasks are Celery's, which this environment doesn't have")

from idempotency import tasks

pytestmark = pytest.mark.django_db(transaction=True)

again = Operation("tests.tasks.reexecute")


def abandon(count: int = 1, operation: str = again.name, **fields: Any) -> list[int]:
    return make_records(count, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR, operation=operation, **fields)


def states() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for name, status in IdempotencyRecord.objects.values_list("operation", "status"):
        found.setdefault(name, Counter())[status] += 1
    return found


def test_a_run_recovers_batch_after_batch_and_returns_plain_data() -> None:
    abandon(7)
    abandon(2, "tests.tasks.unknown")
    counts = tasks.recover_expired_leases(batch_size=3)
    assert json.loads(json.dumps(counts)) == counts
    assert counts == {
        "recoverable": 7,
        "completed": 0,
        "parked": 0,
        "postponed": 0,
        "unknown_operations": {"tests.tasks.unknown": 2},
        "exhausted": True,
    }
    assert states() == {again.name: {"recoverable": 7}, "tests.tasks.unknown": {"in_progress": 2}}


def test_a_run_purges_batch_after_batch_and_returns_plain_data() -> None:
    make_records(7)
    kept = make_records(1, Status.PARKED) + make_records(1, expires=HOUR)
    assert tasks.purge_expired_records(batch_size=3) == {"deleted": 7, "messages": 0, "exhausted": True}
    assert remaining() == {*kept}


def test_a_run_is_bounded_and_tells_that_more_is_due() -> None:
    abandon(5)
    counts = tasks.recover_expired_leases(batch_size=2, max_batches=2)
    assert (counts["recoverable"], counts["exhausted"]) == (4, False)
    make_records(5)
    counts = tasks.purge_expired_records(batch_size=2, max_batches=2)
    assert counts == {"deleted": 4, "messages": 0, "exhausted": False}
    assert tasks.MAX_BATCHES > 1


def test_a_run_purges_sent_messages_as_well_and_counts_them_by_themselves() -> None:
    make_messages(5, MessageStatus.SENT, sent=-96 * HOUR)
    assert tasks.purge_expired_records(batch_size=2) == {"deleted": 0, "messages": 5, "exhausted": True}
    make_messages(5, MessageStatus.SENT, sent=-96 * HOUR)
    counts = tasks.purge_expired_records(batch_size=2, max_batches=2)
    assert counts == {"deleted": 0, "messages": 4, "exhausted": False}


def test_a_run_relays_batch_after_batch_and_returns_plain_data() -> None:
    broker.reset()
    make_messages(7)
    make_messages(1, sender="tests.outbox.removed")
    counts = tasks.relay_outbox(batch_size=3)
    assert json.loads(json.dumps(counts)) == counts
    assert counts == {"sent": 7, "postponed": 1, "dead": 0, "put_back": 0, "unavailable": {}, "exhausted": True}
    assert broker.payloads == [*range(7)]
    make_messages(7)
    assert tasks.relay_outbox(batch_size=2, max_batches=2)["exhausted"] is False


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
        assert task.name == f"idempotency.tasks.{name}"
        # The next run does what a lost one left, so nothing has to come back from a worker that died.
        assert task.acks_late is False
        assert task.time_limit == tasks.TIME_LIMIT
        assert task.soft_time_limit is None


def test_without_celery_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "celery", None)
    monkeypatch.delitem(sys.modules, "idempotency.tasks")
    with pytest.raises(ImportError, match=r"pip install 'django-idempotency\[celery\]'"):
        importlib.import_module("idempotency.tasks")


# Processes that have loaded no view

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
RUN_TASK = """
import json
import django
django.setup()
from idempotency.tasks import recover_expired_leases
print(json.dumps(recover_expired_leases()))
"""
CELERY_APP = """
import os
from pathlib import Path
from celery import Celery
here = Path(os.environ["SHOP"], "broker")
app = Celery("shop", broker="filesystem://", backend=f"file://{here}/results")
app.conf.broker_transport_options = {
    "data_folder_in": str(here), "data_folder_out": str(here), "control_folder": str(here / "control"),
}
app.conf.broker_connection_retry_on_startup = True
app.autodiscover_tasks()
"""


@pytest.fixture
def shop(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that runs a project with the app ``shop``."""
    package = tmp_path / "shop"
    package.mkdir()
    for name, text in {"__init__": "", "operations": OPERATIONS, "settings": SETTINGS, "celery": CELERY_APP}.items():
        (package / f"{name}.py").write_text(text)
    (tmp_path / "broker" / "results").mkdir(parents=True)
    path = f"{tmp_path}:{settings.BASE_DIR}"
    return {"PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "shop.settings", "SHOP": str(tmp_path)}


def abandon_in_the_shop() -> None:
    for name in ("shop.reexecute", "shop.park", "shop.reconcile", "of.another.project"):
        abandon(2, name)


FINDINGS = {
    "recoverable": 2,
    "completed": 2,
    "parked": 2,
    "postponed": 0,
    "unknown_operations": {"of.another.project": 2},
    "exhausted": True,
}
SETTLED = {
    "shop.reexecute": {"recoverable": 2},
    "shop.park": {"parked": 2},
    "shop.reconcile": {"completed": 2},
    "of.another.project": {"in_progress": 2},
}


@pytest.mark.scenario(29)
def test_a_process_that_loaded_no_view_recovers_what_it_knows_and_reports_the_rest(
    shop: dict[str, str],
) -> None:
    abandon_in_the_shop()
    output, errors = processes.start(RUN_TASK, env=shop).communicate(timeout=60)
    assert json.loads(output or "{}") == FINDINGS, errors
    assert "2 abandoned claim(s) of operation 'of.another.project' are left alone" in errors
    assert states() == SETTLED


@pytest.mark.scenario(29)
def test_a_celery_worker_recovers_what_it_knows_and_reports_the_rest(shop: dict[str, str]) -> None:
    abandon_in_the_shop()
    # Else a worker runs Django's system checks when it starts, which load the URLconf.
    environment = {**processes.environment(), **shop, "CELERY_SKIP_CHECKS": "true"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "shop.celery", "worker", "--pool", "solo", "--loglevel", "WARNING"],
        cwd=shop["SHOP"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        # By its name, as a schedule sends it: this process doesn't even have Django set up.
        send = (
            "import json; from shop.celery import app;"
            "sent = app.send_task('idempotency.tasks.recover_expired_leases');"
            "print(json.dumps(sent.get(timeout=60)))"
        )
        completed = subprocess.run(
            [sys.executable, "-c", send], cwd=shop["SHOP"], env=environment, capture_output=True, text=True, check=False
        )
    finally:
        worker.terminate()
        log, _ = worker.communicate(timeout=60)
    assert completed.returncode == 0, completed.stderr + log
    assert json.loads(completed.stdout) == FINDINGS
    assert "2 abandoned claim(s) of operation 'of.another.project' are left alone" in log
    assert states() == SETTLED
