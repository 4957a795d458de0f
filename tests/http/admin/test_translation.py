"""The admin's texts are translated into the language of each request, not the language active at import."""

import re

import pytest
from django.apps import apps
from django.utils import translation
from django.utils.functional import Promise

from idempotency.lifecycle import Status
from idempotency.outbox.models import MessageStatus
from tests.http.admin.pages import DASHBOARD, LIST, MESSAGES, detail, hidden_fields, log_in, text
from tests.outbox import make_messages
from tests.records import HOUR, make_records


def capitals(message):
    """Translate into capitals. Placeholders stay unchanged."""
    return re.sub(r"%(?:\(\w+\))?[sd]|[^%]+", lambda part: part[0] if part[0][0] == "%" else part[0].upper(), message)


@pytest.mark.django_db
def test_the_texts_of_each_page_are_translated(client, monkeypatch):
    monkeypatch.setattr(translation._trans, "gettext", capitals)
    of_count = lambda one, many, count: capitals(one if count == 1 else many)  # noqa: E731
    monkeypatch.setattr(translation._trans, "ngettext", of_count)
    log_in(client, superuser=True)
    (pk,) = make_records(1, Status.PARKED, expires=HOUR, attempt=2)
    make_records(1, Status.IN_PROGRESS, expires=HOUR, lease=-HOUR)
    (dead,) = make_messages(1, MessageStatus.DEAD, attempts=2, account_id="alice")
    page = client.get(detail(pk))
    question = client.post(LIST, {"action": "record_outcome", **hidden_fields(page)})
    refused = client.post(LIST, {**hidden_fields(question), "body": "{", "content_type": "a/json", "status": "201"})
    of_page = [
        "ATTEMPT 2 ENDED WITHOUT",
        "FIND OUT WHETHER",
        "RELEASE…",
        "PAYLOAD'S FINGERPRINT",
        "RETENTION",
        "TIMELINE",
    ]
    of_question = ["YOU KNOW THAT THIS OPERATION", "CONTENT TYPE", "HOW YOU KNOW.", "NO, TAKE ME BACK", "KEY"]
    of_list = ["BY OPERATION", "BY STATE", "IN PROGRESS, LEASE OVER", "OVER FOR 1 h", "ATTEMPT 2", "ACCOUNT 1"]
    of_dashboard = ["STUCK", "ABANDONED: THE NEXT SWEEP", "TAKE-OVERS", "EVENTS BY HOUR", "PURGE OVERDUE FOR"]
    of_message = ["IT WAS TRIED TOO OFTEN", "CORRECT THE CAUSE, THEN", "LAST ERROR"]
    for shown, phrases in (
        (client.get(LIST), of_list),
        (page, of_page),
        (question, of_question),
        (refused, ["THIS IS NOT JSON"]),
        (client.get(MESSAGES), ["ACCOUNT alice", "2 TRIES", "REQUEUE", "DEAD", "A MESSAGE'S ID"]),
        (client.get(DASHBOARD), of_dashboard),
        (client.get(detail(dead, model="outboxmessage")), of_message),
    ):
        assert [phrase for phrase in phrases if phrase not in text(shown)] == []


def test_names_of_models_and_fields_can_be_translated():
    config = apps.get_app_config("idempotency")
    assert isinstance(config.verbose_name, Promise)
    for model in config.get_models():
        assert isinstance(model._meta.verbose_name, Promise)
        assert isinstance(model._meta.verbose_name_plural, Promise)
        plain = [f.name for f in model._meta.get_fields() if not isinstance(getattr(f, "verbose_name", ""), Promise)]
        assert plain == ["id"]
