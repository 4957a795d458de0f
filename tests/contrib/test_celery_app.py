"""Celery's signals are connected wherever Celery is installed, in whatever order a project imports its modules."""

from __future__ import annotations

import subprocess
import sys

SET_UP = """
import sys
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "idempotency"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
assert "celery" not in sys.modules
django.setup()

integration = sys.modules["idempotency.contrib.celery"]

from celery.signals import before_task_publish
from django.core.checks.registry import registry

assert [receiver() for _, receiver in before_task_publish.receivers] == [integration.carry_on_identity]
assert integration.check_tasks in registry.registered_checks
"""


def test_a_project_that_imports_celery_late_is_connected_too() -> None:
    subprocess.run([sys.executable, "-c", SET_UP], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
