"""A parked payment can be decided in an admin whose theme replaces Django's templates."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.admin.pages import plain_text

pytestmark = pytest.mark.once

# The theme replaces the admin's site while Django starts, so it needs a separate process.
PAGE = """
import django
from django.conf import settings

django.setup()
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

call_command("migrate", run_syncdb=True, verbosity=0)
from idempotency.lifecycle import Status
from tests.records import HOUR, make_records

client = Client()
client.force_login(User.objects.create_superuser("staff"))
(pk,) = make_records(1, Status.PARKED, expires=HOUR, error="TimeoutError: no answer", idempotency_key="8e03978e-K")
page = client.get(reverse("admin:idempotency_idempotencyrecord_change", args=[pk]))
print(page.content.decode())
values = dict(action="mark_not_executed", came_from="page", _selected_action=pk)
print("NEXT", client.post(reverse("admin:idempotency_idempotencyrecord_changelist"), values).content.decode())
print("NEXT", client.get(reverse("admin:idempotency_dashboard")).content.decode())
"""

SETTINGS = """
from testproject.settings import *

INSTALLED_APPS = [{app!r}, *INSTALLED_APPS]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "themed_urls"
#: No app has migrations, so the tables are created in one step.
MIGRATION_MODULES = type("Without", (dict,), {{"__contains__": lambda *_: True, "__getitem__": lambda *_: None}})()
"""

URLS = """
from django.apps import apps
from django.urls import include, path
from testproject.urls import urlpatterns

if apps.is_installed("grappelli"):
    urlpatterns = [path("grappelli/", include("grappelli.urls")), *urlpatterns]
"""


@pytest.mark.parametrize("theme", ["unfold", "jazzmin", "grappelli"])
def test_a_theme_shows_state_timeline_and_decisions_of_a_record(tmp_path, theme):
    pytest.importorskip(theme, reason=f"django-{theme} is not installed")
    (tmp_path / "themed_settings.py").write_text(SETTINGS.format(app=theme))
    (tmp_path / "themed_urls.py").write_text(URLS)
    path = os.pathsep.join([str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "themed_settings"}
    done = subprocess.run([sys.executable, "-c", PAGE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page, question, dashboard = done.stdout.split("NEXT")
    assert theme in page
    shown = plain_text(page)
    for part in (
        "8e03978e-K",
        "parked",
        "Every retry gets status 409.",
        "The request was claimed for the first time.",
        "TimeoutError: no answer",
    ):
        assert part in shown
    form = page[page.rindex("<form", 0, page.index('value="record_outcome"')) : page.rindex("</form>")]
    assert re.findall(r'name="action" value="(\w+)"', form) == ["record_outcome", "mark_not_executed", "release"]
    assert "csrfmiddlewaretoken" in form
    assert "You know that this operation did not take effect" in plain_text(question)
    assert "8e03978e-K" in plain_text(dashboard)
    # Not every theme shows the title of a page.
    assert '<h1 class="idempotency-title">Mark as not executed</h1>' in question
    assert '<h1 class="idempotency-title">Idempotency: dashboard</h1>' in dashboard
