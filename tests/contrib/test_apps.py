"""Each part of the package is an app. What is not in ``INSTALLED_APPS`` has no table, runs nothing, and says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROJECT = """
import django, sys
from django.conf import settings

settings.configure(
    SECRET_KEY="tests",
    INSTALLED_APPS=[
        "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
        "django.contrib.sessions", "idempotency", *sys.argv[1:],
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": [
            "django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]},
    }],
    ROOT_URLCONF="__main__",
    STATIC_URL="static/",
    ALLOWED_HOSTS=["testserver"],
    DATABASES={"default": {
        "ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
django.setup()
from django.contrib import admin
from django.core.management import call_command, get_commands
from django.db import connection
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
call_command("migrate", verbosity=0)
"""

TABLES = """
print(sorted(name for name in connection.introspection.table_names() if name.startswith("idempotency")))
"""

USED = """
from datetime import timedelta
from django.contrib.auth.models import User
from django.test import Client
from idempotency import claim
from idempotency.contrib.metrics import read_gauges
from idempotency.models import IdempotencyRecord
from idempotency.operate.erasure import erase_account
from idempotency.operate.stats import stats

for _ in range(2):
    with claim("shop.order", account_id="1", key="k") as run:
        if not run.replayed:
            run.result = {"id": 7}
record = IdempotencyRecord.objects.get()
client = Client()
client.force_login(User.objects.create_superuser("olga"))
for url in ("", "idempotency/", "idempotency/idempotencyrecord/", f"idempotency/idempotencyrecord/{record.pk}/change/"):
    page = client.get(f"/admin/{url}")
    assert page.status_code == 200, (url, page)
for command in ("recover_idempotency", "purge_idempotency", "idempotency_stats"):
    call_command(command, verbosity=0, **({"json": True} if command == "idempotency_stats" else {}))
call_command("idempotency_stats", by_operation=True)
counted = stats()
print(counted.completed.value, counted.claims.value, counted.replays.value, str(counted.since_purge.kind))
print(sorted(name for name in read_gauges() if "outbox" in name and read_gauges()[name]))
print(erase_account("1", by="a test")[0].records)
admin.site.unregister(IdempotencyRecord)
if "idempotency.contrib.dashboard" in sys.argv:
    assert client.get("/admin/idempotency_dashboard/idempotencycounter/").status_code == 200
print("celery" in sys.modules, "prometheus_client" in sys.modules)
"""

REFUSED = """
from django.core.exceptions import ImproperlyConfigured
def publishing():
    from idempotency.outbox import publish
def relaying():
    from idempotency.outbox.relay import relay_once
def consuming():
    from idempotency.contrib.celery import idempotent_task
def counting():
    from idempotency.contrib.dashboard.counters import counters
import idempotency.outbox
assert not hasattr(idempotency.outbox, "nonsense")
import idempotency.contrib.celery
assert not hasattr(idempotency.contrib.celery, "nonsense")
for used in (publishing, relaying, consuming, counting):
    try:
        used()
    except ImproperlyConfigured as error:
        print(error)
print("relay_outbox" in get_commands())
"""


def run(script: str, *apps: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROJECT + script, *apps], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


RECORDS = ["idempotency_record", "idempotency_step"]


@pytest.mark.parametrize(
    ("apps", "tables"),
    [
        ([], RECORDS),
        (["idempotency.outbox"], ["idempotency_outbox_message", *RECORDS]),
        (["idempotency.contrib.dashboard"], ["idempotency_dashboard_counter", *RECORDS]),
        (["idempotency.contrib.celery", "idempotency.contrib.prometheus"], RECORDS),
        (["idempotency.contrib.opentelemetry"], RECORDS),
    ],
    ids=str,
)
def test_an_app_brings_its_own_tables(apps: list[str], tables: list[str]) -> None:
    assert run(TABLES, *apps) == [str(tables)]


@pytest.mark.parametrize(
    ("apps", "said"),
    [
        ([], ["1 None None unknown", "[]", "1", "False False"]),
        (["idempotency.contrib.dashboard"], ["1 1 1 recent", "[]", "1", "False False"]),
        (
            ["idempotency.outbox"],
            [
                "1 None None unknown",
                "['idempotency_outbox_messages', 'idempotency_outbox_oldest_due_seconds']",
                "1",
                "False False",
            ],
        ),
    ],
    ids=str,
)
def test_every_part_works_without_the_others(apps: list[str], said: list[str]) -> None:
    assert run(USED, *apps)[-4:] == said


def test_what_is_used_without_its_app_says_which_one() -> None:
    *errors, has_command = run(REFUSED)
    apps = ["idempotency.outbox", "idempotency.outbox", "idempotency.contrib.celery", "idempotency.contrib.dashboard"]
    assert [error.split("'")[1] for error in errors] == apps
    assert all("is not in INSTALLED_APPS" in error for error in errors)
    assert has_command == "False"


ADAPTERS = """
from idempotency.http import adapter
print([known.__name__ for known in adapter.adapters])
"""


@pytest.mark.parametrize(
    ("apps", "adapters"),
    [([], ["Adapter"]), (["rest_framework", "ninja"], ["NinjaAdapter", "RestFrameworkAdapter", "Adapter"])],
    ids=str,
)
def test_a_framework_has_an_adapter_if_it_is_an_app(apps: list[str], adapters: list[str]) -> None:
    for framework in apps:
        pytest.importorskip(framework)
    assert run(ADAPTERS, *apps) == [str(adapters)]


CHECKED = """
import celery
from django.core.checks import run_checks
print([message.id for message in run_checks() if message.id == "idempotency.W017"])
"""


@pytest.mark.parametrize(("apps", "found"), [([], ["idempotency.W017"]), (["idempotency.contrib.celery"], [])], ids=str)
def test_a_check_finds_celery_without_its_app(apps: list[str], found: list[str]) -> None:
    assert run(CHECKED, *apps) == [str(found)]
