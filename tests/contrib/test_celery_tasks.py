"""The Celery tasks: their bounds and names. A worker runs one of them in ``tests/test_orders.py``."""

import json
from datetime import timedelta

import pytest
from celery import current_app

from idempotency.contrib.celery import tasks
from idempotency.contrib.celery.policy import import_tasks
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.models import MessageStatus
from tests.database import processes
from tests.database.claiming import again
from tests.outbox import broker, make_messages
from tests.records import HOUR, MINUTE, abandon, make_bodies, make_records

pytestmark = pytest.mark.django_db(transaction=True)


#: The work of each task, and its result when it is done and when it stops after one batch.
RUNS = {
    "recover": (
        lambda: (abandon(7, again), abandon(2, "tests.tasks.unknown")),
        tasks.recover_expired_leases,
        {"recoverable": 7, "completed": 0, "parked": 0, "postponed": 0}
        | {"unknown_operations": {"tests.tasks.unknown": 2}, "exhausted": True},
        {"recoverable": 3, "unknown_operations": {"tests.tasks.unknown": 4}},
    ),
    "purge": (
        lambda: (make_records(7), make_records(1, Status.PARKED, expires=-MINUTE), make_records(1, expires=HOUR)),
        tasks.purge_expired_records,
        {"deleted": 7, "bodies": 0, "messages": 0, "exhausted": True},
        {"deleted": 3},
    ),
    "purge of messages": (
        lambda: make_messages(7, MessageStatus.SENT, sent=-96 * HOUR),
        tasks.purge_expired_records,
        {"deleted": 0, "bodies": 0, "messages": 7, "exhausted": True},
        {"messages": 3},
    ),
    "purge of responses": (
        lambda: make_bodies(7),
        tasks.purge_expired_records,
        {"deleted": 0, "bodies": 7, "messages": 0, "exhausted": True},
        {"bodies": 3},
    ),
    "relay": (
        lambda: (make_messages(7), make_messages(1, sender="tests.outbox.removed", due=timedelta(0))),
        tasks.relay_outbox,
        {"sent": 7, "postponed": 1, "dead": 0, "put_back": 0, "paused": {}, "exhausted": True},
        {"sent": 3, "postponed": 0},
    ),
}


@pytest.mark.parametrize(("make", "task", "done", "stopped"), RUNS.values(), ids=RUNS)
def test_a_task_begins_no_batch_near_its_time_limit_and_returns_plain_data(make, task, done, stopped, monkeypatch):
    broker.reset()
    make()
    counts = task(batch_size=3)
    assert json.loads(json.dumps(counts)) == counts == done
    make()
    monkeypatch.setattr(tasks, "TIME_LIMIT", 0)
    assert task(batch_size=3) == done | stopped | {"exhausted": False}


def test_the_tasks_have_the_documented_names():
    for name in ("recover_expired_leases", "purge_expired_records", "relay_outbox"):
        task = getattr(tasks, name)
        assert task.name == f"idempotency.contrib.celery.tasks.{name}"
        # The next run completes a lost run's work, so the message of a worker that died need not be redelivered.
        assert task.acks_late is False
        assert task.time_limit == tasks.TIME_LIMIT
        assert task.soft_time_limit is None


# Outside a worker, the sweep imports the operations of Celery's tasks


#: A process that has imported no task module. Its script prints the result as JSON.
OUTSIDE = """
import json
from celery import current_app
import django
django.setup()
from idempotency.operation import registry
assert registry.get("receipts.send") is None, "something has imported the tasks"
"""

COMMAND = """
from django.core.management import call_command
code = 0
try:
    call_command("recover_idempotency", verbosity=0)
except SystemExit as ended:
    code = ended.code
print(json.dumps(code))
"""


def run(script):
    """The lines of a process's standard output, and its standard error."""
    process = processes.start(OUTSIDE + script)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return printed.splitlines(), errors


@pytest.mark.once
def test_the_sweep_of_the_command_line_settles_the_claims_of_tasks():
    abandon(1, "receipts.send")
    assert run(COMMAND) == (["0"], "")
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


def test_a_worker_does_not_import_its_tasks_again(monkeypatch):
    """Celery would set up Django again, and replace the worker's logging."""
    imported = []
    loader = current_app.loader
    monkeypatch.setattr(loader, "import_default_modules", lambda: imported.append(True))
    for is_worker, count in ((True, 0), (False, 1)):
        monkeypatch.setattr(loader, "worker_initialized", is_worker)
        import_tasks()
        assert len(imported) == count


#: The checks, first without the databases, which import nothing then.
CHECKS = """
from django.core.checks import run_checks
current_app.conf.task_time_limit = 3600
for databases in (None, ["default"]):
    found = sorted(message.id for message in run_checks(databases=databases) if "receipts.send" in message.msg)
    print(json.dumps(found))
"""


@pytest.mark.once
@pytest.mark.failure_6
def test_the_checks_know_the_tasks_of_a_project_in_every_process():
    assert run(CHECKS) == (['["idempotency.W005"]'] * 2, "")


@pytest.mark.once
def test_a_task_module_that_cannot_be_imported_stops_no_check_and_is_reported_once():
    printed, errors = run('current_app.conf.imports = ["tests.no_such_module"]' + CHECKS)
    assert printed == ['["idempotency.W005"]'] * 2
    assert errors.count("Some operations are unknown in this process") == 1


@pytest.mark.once
def test_a_task_module_that_cannot_be_imported_is_reported():
    abandon(1, "tests.elsewhere")
    abandon(1, "charges.create")
    printed, errors = run('current_app.conf.imports = ["tests.no_such_module"]' + COMMAND)
    assert printed == ["4"]
    assert "No module named 'tests.no_such_module'" in errors
    assert "import the module of its task" in errors
    assert sorted(IdempotencyRecord.objects.values_list("status", flat=True)) == ["in_progress", "recoverable"]
