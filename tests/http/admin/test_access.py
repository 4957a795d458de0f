"""Permissions to view, change and decide. Records and messages follow the same rules."""

from collections.abc import Callable
from dataclasses import dataclass
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.db.models import Model
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outbox.models import MessageStatus, OutboxMessage
from tests.http.admin.pages import OUTCOME, SECRET, log_in, secret_record, text
from tests.outbox import make_messages
from tests.records import HOUR

# Permissions are checked before a record is queried.
pytestmark = [pytest.mark.django_db, pytest.mark.once]


@dataclass(frozen=True)
class Page:
    """The pages of a model, and the secrets that they hide."""

    model: type[Model]
    make: Callable[[], int]
    may_read: str
    secrets: list
    columns: list
    #: Permissions that don't suffice for each decision.
    decisions: dict[str, list]

    def url(self, view="changelist", *pk):
        return reverse(f"admin:{self.model._meta.app_label}_{self.model._meta.model_name}_{view}", args=pk)

    @property
    def may_view(self):
        return f"view_{self.model._meta.model_name}"


ERROR = f"ValueError: no such card: {SECRET}"
CARD = f'{{"card": "{SECRET}"}}'


def dead_message():
    (pk,) = make_messages(1, MessageStatus.DEAD, payload=CARD, headers={"Authorization": SECRET}, error=ERROR)
    return pk


PAGES = [
    Page(
        model=IdempotencyRecord,
        make=lambda: secret_record(status=Status.PARKED, expires=HOUR),
        may_read="view_response_body",
        secrets=[CARD, f"Link: {SECRET}\nLink: second", f"reference {SECRET}", f"ValueError: {SECRET}"],
        columns=["response_body", '"error"'],
        decisions={
            "mark_not_executed": ["release_idempotencyrecord", "change_idempotencyrecord", "view_response_body"],
            "record_outcome": ["release_idempotencyrecord", "change_idempotencyrecord", "view_response_body"],
            "release": ["resolve_idempotencyrecord", "change_idempotencyrecord", "view_response_body"],
            "forget": ["release_idempotencyrecord", "resolve_idempotencyrecord", "change_idempotencyrecord"],
        },
    ),
    Page(
        model=OutboxMessage,
        make=dead_message,
        may_read="view_payload",
        secrets=[CARD, f"Authorization: {SECRET}", ERROR],
        columns=['"payload"', '"headers"', '"error"'],
        decisions={"requeue": ["change_outboxmessage", "view_payload"]},
    ),
]

each_page = pytest.mark.parametrize("page", PAGES, ids=["records", "messages"])


@each_page
def test_no_user_adds_changes_or_deletes(client, page):
    log_in(client, superuser=True)
    pk = page.make()
    before = page.model._default_manager.values().get()
    assert client.get(page.url("add")).status_code == 403
    assert client.post(page.url("add"), {}).status_code == 403
    assert client.post(page.url("change", pk), {"status": "recoverable", "state": "sent"}).status_code == 403
    assert client.post(page.url("delete", pk), {"post": "yes"}).status_code == 403
    client.post(page.url(), {"action": "delete_selected", "_selected_action": [pk], "post": "yes"})
    assert page.model._default_manager.values().get() == before


@each_page
def test_without_the_view_permission_nothing_is_shown(client, page):
    pk = page.make()
    log_in(client, page.may_read)
    for url in (page.url(), page.url("change", pk)):
        response = client.get(url)
        assert response.status_code == 403
        assert SECRET not in unescape(response.content.decode())


@pytest.mark.scenario_28
@pytest.mark.failure_52
@each_page
def test_secrets_are_neither_shown_nor_queried_without_the_permission(client, page):
    pk = page.make()
    log_in(client, page.may_view)
    with CaptureQueriesContext(connection) as statements:
        shown = [client.get(url) for url in (page.url(), page.url("change", pk), page.url("history", pk))]
    assert [one.status_code for one in shown] == [200, 200, 200]
    assert not [one for one in shown if "4242" in one.content.decode()]
    assert not [one for one in statements for column in page.columns if column in one["sql"]]


@pytest.mark.scenario_28
@each_page
def test_secrets_are_shown_with_the_permission(client, page):
    pk = page.make()
    log_in(client, page.may_view, page.may_read)
    shown = client.get(page.url("change", pk)).content.decode()
    assert SECRET not in shown, "the page must escape its values"
    assert [secret for secret in page.secrets if secret not in unescape(shown)] == []
    assert SECRET not in unescape(client.get(page.url()).content.decode())


@pytest.mark.parametrize(
    ("page", "lookup"),
    [
        *[(PAGES[0], lookup) for lookup in ("response_body__startswith", "response_body", "response_headers__0__0")],
        *[(PAGES[0], lookup) for lookup in ("response_reference__contains", "request_hash")],
        *[(PAGES[1], lookup) for lookup in ("payload__contains", "headers__has_key", "error__contains", "topic")],
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hidden_column_cannot_be_filtered_on(client, page, lookup):
    """Otherwise a staff member without the permission could guess its value letter by letter."""
    page.make()
    log_in(client, page.may_view)
    assert client.get(page.url(), {lookup: "x"}).status_code == 400


@pytest.mark.parametrize(("page", "action"), [(page, action) for page in PAGES for action in page.decisions])
def test_each_decision_needs_its_own_permission(client, page, action):
    pk = page.make()
    log_in(client, page.may_view, *page.decisions[action])
    assert f'value="{action}"' not in client.get(page.url()).content.decode()
    if action == "forget":
        IdempotencyRecord.objects.update(status=Status.COMPLETED)
    before = page.model._default_manager.values().get()
    seen = f"{pk}:{before.get('attempt', 0)}:{before['status']}"
    values = {"action": action, "_selected_action": [pk], "decided": "yes", "seen": [seen], **OUTCOME}
    is_refused = "No action selected" in text(client.post(page.url(), values, follow=True))
    assert is_refused is (len(page.decisions) > 1)  # without another decision, the page has no list of actions
    assert page.model._default_manager.values().get() == before
    assert not LogEntry.objects.exists()
