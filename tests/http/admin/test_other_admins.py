"""A project may register admins of its own for this package's models."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import path

from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.outbox.models import OutboxMessage
from tests.http.admin.pages import log_in
from tests.outbox import make_messages
from tests.records import make_records

pytestmark = [pytest.mark.django_db, pytest.mark.once]

MODELS = [IdempotencyRecord, OutboxMessage, IdempotencyStep, IdempotencyCounter]

site = admin.AdminSite()
for model in MODELS:
    site.register(model)

urlpatterns = [path("own/", site.urls)]


@pytest.fixture
def staff(client: Client, settings: Any) -> Client:
    settings.ROOT_URLCONF = __name__
    return log_in(client, superuser=True)


@pytest.mark.parametrize("model", MODELS)
def test_an_admin_of_the_project_shows_its_own_pages(staff: Client, model: Any) -> None:
    (record,) = make_records(1)
    make_messages(1)
    IdempotencyStep.objects.create(record_id=record, account_id="1", name="a", result="{}")
    IdempotencyCounter.objects.create(operation="a", event="claimed")
    row = model._default_manager.first()
    address = f"/own/{model._meta.app_label}/{model._meta.model_name}/"
    for url in (address, f"{address}{row.pk}/change/", f"{address}add/", f"{address}{row.pk}/delete/"):
        page = staff.get(url)
        assert page.status_code == 200
        assert [one.name for one in page.templates if one.name and one.name.startswith("idempotency/")] == []
