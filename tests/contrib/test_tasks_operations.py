"""Outside of a worker, the sweep knows the operations of Celery's tasks."""

from __future__ import annotations

import pytest
from celery import current_app

from idempotency.contrib.celery.policy import import_tasks
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from tests.database import processes
from tests.records import HOUR, make_records

pytestmark = pytest.mark.django_db(transaction=True)

#: A process that has imported no module of tasks. What is run there prints its answer as JSON.
OUTSIDE = """
import json, sys
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
    call_command("recover_idempotency", verbosity=0, dry_run=bool(int(sys.argv[1])))
except SystemExit as ended:
    code = ended.code
print(json.dumps(code))
"""


def run(script: str, *arguments: str, **env: str) -> tuple[list[str], str]:
    """The lines that a process printed, and what it said besides."""
    process = processes.start(OUTSIDE + script, *arguments, env=env)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return printed.splitlines(), said


def test_the_sweep_of_the_command_line_settles_the_claims_of_tasks() -> None:
    make_records(1, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR, operation="receipts.send")
    assert run(COMMAND, "1")[0] == ["1 claim abandoned.", "  receipts.send: 1 (reexecute)", "0"]
    assert run(COMMAND, "0") == (["0"], "")
    assert IdempotencyRecord.objects.get().status == Status.RECOVERABLE


def test_a_worker_does_not_import_its_tasks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery would set Django up again, and with it the logging that the worker has set up."""
    imported: list[bool] = []
    loader = current_app.loader
    monkeypatch.setattr(loader, "import_default_modules", lambda: imported.append(True))
    for is_worker, count in ((True, 0), (False, 1)):
        monkeypatch.setattr(loader, "worker_initialized", is_worker)
        import_tasks()
        assert len(imported) == count


BROKEN = """
current_app.conf.imports = ["tests.no_such_module"]
"""


def test_tasks_that_can_not_be_imported_are_reported_and_leave_the_rest() -> None:
    make_records(1, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR, operation="tests.elsewhere")
    make_records(1, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR, operation="charges.create")
    printed, said = run(BROKEN + COMMAND, "0")
    assert printed == ["4"]
    assert "No module named 'tests.no_such_module'" in said
    assert "import the module of its task" in said
    assert sorted(IdempotencyRecord.objects.values_list("status", flat=True)) == ["in_progress", "recoverable"]
