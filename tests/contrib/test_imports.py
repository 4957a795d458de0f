"""What an integration needs to be imported: its libraries, which its error names. A client needs no Django project."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

# Imported before a library is taken away.
import idempotency.contrib.celery
import idempotency.contrib.httpx
import idempotency.contrib.ninja
import idempotency.contrib.opentelemetry
import idempotency.contrib.prometheus
import idempotency.contrib.requests
import idempotency.contrib.spectacular  # noqa: F401


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("idempotency.contrib.celery", "celery.signals", "celery"),
        ("idempotency.contrib.httpx", "httpx", "httpx"),
        ("idempotency.contrib.httpx", "tenacity", "httpx"),
        ("idempotency.contrib.requests", "requests", "requests"),
        ("idempotency.contrib.requests", "tenacity", "requests"),
        ("idempotency.contrib.retrying", "tenacity", "httpx"),
        ("idempotency.contrib.ninja", "ninja.utils", "ninja"),
        ("idempotency.contrib.spectacular", "drf_spectacular", "spectacular"),
        ("idempotency.contrib.prometheus", "prometheus_client", "prometheus"),
        ("idempotency.contrib.opentelemetry", "opentelemetry.trace", "opentelemetry"),
    ],
)
def test_without_its_libraries_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, missing: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=rf"pip install 'django-idempotency\[{extra}\]'"):
        importlib.import_module(module)


def test_a_release_of_ninja_without_what_is_private_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ninja.operation.Operation._result_to_response")
    monkeypatch.delitem(sys.modules, "idempotency.contrib.ninja")
    with pytest.raises(ImportError, match=r"a release of Django Ninja that it was tested with\. .*"):
        importlib.import_module("idempotency.contrib.ninja")


CLIENT = """
import sys
import httpx
from idempotency.contrib.httpx import IdempotentTransport
from idempotency.contrib.requests import IdempotentAdapter
IdempotentAdapter()
sent = []
def answer(request):
    sent.append(request.headers["Idempotency-Key"])
    return httpx.Response(503 if len(sent) == 1 else 201)
with httpx.Client(transport=IdempotentTransport(httpx.MockTransport(answer), sleep=lambda seconds: None)) as client:
    assert client.post("https://shop.test/").status_code == 201
assert len(sent) == 2 and len(set(sent)) == 1
from django.conf import settings
assert not settings.configured, "a client needs no project"
assert "idempotency.models" not in sys.modules
"""


LATE_CELERY = """
import sys
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "idempotency", "idempotency.contrib.celery"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
assert "celery" not in sys.modules
django.setup()
from idempotency.contrib.celery.checks import check_tasks
from idempotency.contrib.celery.messages import carry_on_identity

from celery.signals import before_task_publish
from django.core.checks.registry import registry

assert [receiver() for _, receiver in before_task_publish.receivers] == [carry_on_identity]
assert check_tasks in registry.registered_checks
"""


@pytest.mark.parametrize("script", [CLIENT, LATE_CELERY], ids=["a client", "a project that imports celery late"])
def test_in_a_process_of_its_own_nothing_else_is_needed_for(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
