"""Each part of the package is an app. One not in ``INSTALLED_APPS`` has no table, runs no code, and raises an error."""

import importlib
import json
import os
import subprocess
import sys

import pytest

# Imported before a test makes a library unavailable.
import idempotency.contrib.celery
import idempotency.contrib.ninja
import idempotency.contrib.opentelemetry
import idempotency.contrib.prometheus
import idempotency.contrib.spectacular  # noqa: F401
from tests.contrib.project import PROJECT

USED = """
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.test import Client
from idempotency import claim
from idempotency.http import adapter
from idempotency.models import IdempotencyRecord
from idempotency.operate.erasure import erase_account
from idempotency.operate import statistics
from idempotency.operate.statistics import stats

for _ in range(2):
    with claim("shop.order", account_id="1", key="k") as run:
        if not run.replayed:
            run.result = {"id": 7}
record = IdempotencyRecord.objects.get()
client = Client()
client.force_login(User.objects.create_superuser("olga"))
pages = ["", "idempotency/", "idempotency/idempotencyrecord/", f"idempotency/idempotencyrecord/{record.pk}/change/"]
for url in pages:
    page = client.get(f"/admin/{url}")
    assert page.status_code == 200, (url, page)
for command in ("recover_idempotency", "purge_idempotency", "idempotency_stats"):
    call_command(command, verbosity=0, **({"json": True} if command == "idempotency_stats" else {}))
statistics.write_counts()
counted, gauges = stats(), []
if "idempotency.contrib.prometheus" in sys.argv:
    from idempotency.contrib.prometheus.exporter import read_gauges
    gauges = sorted(name for name in read_gauges() if "outbox" in name)
report = {
    "tables": [name for name in sorted(connection.introspection.table_names()) if name.startswith("idempotency")],
    "adapters": [known.__name__ for known in adapter.adapters],
    "counted": [counted.completed.value, counted.claims.value, counted.replays.value],
    "gauges": gauges,
    "erased": erase_account("1", by="a test")[0].records,
    "imported": [name for name in ("celery", "prometheus_client") if name in sys.modules],
    "relays": "relay_outbox" in get_commands(),
}
admin.site.unregister(IdempotencyRecord)
if "idempotency.contrib.dashboard" in sys.argv:
    assert client.get("/admin/idempotency_dashboard/idempotencycounter/").status_code == 200

if "idempotency.contrib.celery" in sys.argv:  # the app has imported it, and has connected its signal and its check
    from celery.signals import before_task_publish
    from django.core.checks.registry import registry
    from idempotency.contrib.celery.checks import check_tasks
    from idempotency.contrib.celery.messages import carry_on_identity

    assert [receiver() for _, receiver in before_task_publish.receivers] == [carry_on_identity]
    assert check_tasks in registry.registered_checks

import celery
import idempotency.contrib.celery, idempotency.outbox
report["missing"] = [message.id for message in run_checks() if message.id == "idempotency.W017"]
assert not hasattr(idempotency.outbox, "nonsense")
assert not hasattr(idempotency.contrib.celery, "nonsense")
def publishing():
    from idempotency.outbox import publish
def relaying():
    from idempotency.outbox.relay import relay_batches
def consuming():
    from idempotency.contrib.celery import idempotent_task
def counting():
    from idempotency.contrib.dashboard.counting import counters
report["refused"] = []
for used in (publishing, relaying, consuming, counting):
    try:
        used()
    except ImproperlyConfigured as error:
        assert "is not in INSTALLED_APPS" in str(error)
        report["refused"].append(str(error).split("'")[1])
print(json.dumps(report))
"""

OUTBOX, DASHBOARD, CELERY = "idempotency.outbox", "idempotency.contrib.dashboard", "idempotency.contrib.celery"
RECORDS = ["idempotency_record", "idempotency_step"]
ALONE = {
    "tables": RECORDS,
    "adapters": ["Adapter"],
    "counted": [1, None, None],
    "gauges": [],
    "erased": 1,
    "imported": [],
    "relays": False,
    "missing": ["idempotency.W017"],
    "refused": [OUTBOX, OUTBOX, CELERY, DASHBOARD],
}
WITH = {
    (): {},
    (OUTBOX, "idempotency.contrib.prometheus"): {
        "tables": ["idempotency_outbox_message", *RECORDS],
        "gauges": ["idempotency_outbox_messages", "idempotency_outbox_oldest_due_seconds"],
        "imported": ["prometheus_client"],
        "relays": True,
        "refused": [CELERY, DASHBOARD],
    },
    (DASHBOARD, "idempotency.contrib.opentelemetry", "rest_framework", "ninja"): {
        "tables": ["idempotency_dashboard_counter", *RECORDS],
        "adapters": ["NinjaAdapter", "RestFrameworkAdapter", "Adapter"],
        "counted": [1, 1, 1],
        "refused": [OUTBOX, OUTBOX, CELERY],
    },
    (CELERY, "idempotency.contrib.prometheus"): {
        "imported": ["celery", "prometheus_client"],
        "missing": [],
        "refused": [OUTBOX, OUTBOX, DASHBOARD],
    },
}


@pytest.mark.parametrize(("apps", "more"), WITH.items(), ids=str)
def test_each_app_works_without_the_other_apps(apps, more, tmp_path):
    for framework in {"rest_framework", "ninja"} & set(apps):
        pytest.importorskip(framework)
    command = [sys.executable, "-W", "error", "-c", PROJECT + USED, *apps]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ALONE | more


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("idempotency.contrib.celery", "celery.signals", "celery"),
        ("idempotency.contrib.ninja", "ninja.utils", "ninja"),
        ("idempotency.contrib.spectacular", "drf_spectacular", "spectacular"),
        ("idempotency.contrib.prometheus", "prometheus_client", "prometheus"),
        ("idempotency.contrib.opentelemetry", "opentelemetry.trace", "opentelemetry"),
    ],
)
def test_without_its_libraries_the_error_names_the_extra_to_install(monkeypatch, module, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=rf"pip install 'django-idempotency\[{extra}\]'"):
        importlib.import_module(module)


def test_a_release_of_ninja_without_a_required_private_name_is_refused(monkeypatch):
    monkeypatch.delattr("ninja.operation.Operation._result_to_response")
    monkeypatch.delitem(sys.modules, "idempotency.contrib.ninja")
    with pytest.raises(ImportError, match=r"a release of Django Ninja that it was tested with\. .*"):
        importlib.import_module("idempotency.contrib.ninja")
