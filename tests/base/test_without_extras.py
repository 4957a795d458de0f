"""Django is the one hard dependency: the core imports, migrates and protects a view without any extra."""

import subprocess
import sys

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

# The packages of the extras, and their dependencies that the core might import by mistake.
EXTRAS = "celery cryptography drf_spectacular environ kombu ninja opentelemetry prometheus_client psutil psycopg"
EXTRAS += " psycopg2 rest_framework"

IMPORT_THE_CORE = """
import importlib, pkgutil, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {extras!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "idempotency",
        "idempotency.outbox", "idempotency.contrib.dashboard",
    ],
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
)
django.setup()

import idempotency

for module in pkgutil.walk_packages(idempotency.__path__, "idempotency."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        integrates = module.name.startswith("idempotency.contrib.")
        if not integrates or "pip install 'django-idempotency[" not in str(error):
            raise
for name in idempotency.__all__:
    getattr(idempotency, name)
"""


def test_the_core_imports_where_no_extra_is_installed():
    """An integration imported without its extra explains how to install it."""
    script = IMPORT_THE_CORE.format(extras=EXTRAS.split())
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.urls("tests.base.urls")
@pytest.mark.django_db(transaction=True)
def test_a_plain_view_runs_once_and_replays_without_any_extra():
    client = Client()
    client.force_login(User.objects.create(username="alice"))

    def post(key, prefix):
        response = client.post(
            "/groups/", {"prefix": prefix}, content_type="application/json", headers={"Idempotency-Key": key}
        )
        return response.status_code, response.content, "Idempotency-Replayed" in response.headers

    status, body, replayed = post("k1", "a")
    assert (status, replayed) == (201, False)
    assert post("k1", "a") == (201, body, True)
    assert post("k1", "b")[0] == 422
    assert [group.name for group in Group.objects.all()] == ["a-0"]
