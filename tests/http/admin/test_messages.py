"""The admin finds a message, shows its state and why it is dead, and requeues it; payloads are for the permitted."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from idempotency.admin import display, messages
from idempotency.models import MessageStatus, OutboxMessage
from tests.http.admin.pages import SECRET, hidden_fields, log_in, said, text, told
from tests.outbox import make_messages, statuses
from tests.records import HOUR

pytestmark = pytest.mark.django_db

LIST = reverse("admin:idempotency_outboxmessage_changelist")
PENDING, SENT, DEAD = MessageStatus.PENDING, MessageStatus.SENT, MessageStatus.DEAD


@pytest.fixture
def viewer(client: Client) -> Client:
    log_in(client, "view_outboxmessage")
    return client


@pytest.fixture
def operator(client: Client) -> Client:
    log_in(client, "view_outboxmessage", "requeue_outboxmessage")
    return client


def detail(pk: int, view: str = "change") -> str:
    return reverse(f"admin:idempotency_outboxmessage_{view}", args=[pk])


def listed(client: Client, **query: str) -> list[int]:
    page = client.get(LIST, query)
    assert page.status_code == 200, page
    return [message.pk for message in page.context["cl"].result_list]


def secret_message(**fields: Any) -> int:
    (pk,) = make_messages(payload=f'{{"card": "{SECRET}"}}', headers={"Authorization": SECRET}, **fields)
    return pk


# Who sees what


def test_nobody_adds_changes_or_deletes_a_message(client: Client) -> None:
    log_in(client, superuser=True)
    (pk,) = make_messages(1)
    assert client.get(reverse("admin:idempotency_outboxmessage_add")).status_code == 403
    assert client.post(detail(pk), {"state": "sent"}).status_code == 403
    assert client.post(detail(pk, "delete"), {"post": "yes"}).status_code == 403
    client.post(LIST, {"action": "delete_selected", "_selected_action": [pk], "post": "yes"})
    assert statuses() == [("pending", 0)]


def test_who_has_no_permission_sees_nothing(client: Client) -> None:
    pk = secret_message()
    log_in(client, "view_payload")
    for url in (LIST, detail(pk)):
        assert client.get(url).status_code == 403


def test_a_payload_is_shown_to_the_permitted_only(client: Client) -> None:
    pk = secret_message(status=DEAD)
    log_in(client, "view_outboxmessage", "requeue_outboxmessage")
    with CaptureQueriesContext(connection) as statements:
        pages = [client.get(LIST), client.get(detail(pk)), client.get(detail(pk, "history")), ask(client, pk)]
    assert [page.status_code for page in pages] == [200] * 4
    assert not [page for page in pages if "4242" in page.content.decode()]
    # Not shown because not read.
    assert not [one for one in statements.captured_queries if '"payload"' in one["sql"] or '"headers"' in one["sql"]]


def test_the_permitted_read_the_payload(client: Client) -> None:
    pk = secret_message()
    log_in(client, "view_outboxmessage", "view_payload")
    page = client.get(detail(pk))
    assert SECRET not in page.content.decode(), "the page must escape what a message holds"
    assert f'{{"card": "{SECRET}"}}' in text_of(page)
    assert f"Authorization: {SECRET}" in text_of(page)
    assert SECRET not in unescape(client.get(LIST).content.decode())


def text_of(page: HttpResponse) -> str:
    return unescape(page.content.decode())


@pytest.mark.parametrize("lookup", ["payload__contains", "headers__has_key", "error__contains", "topic"])
def test_what_is_not_shown_can_not_be_filtered_on(viewer: Client, lookup: str) -> None:
    secret_message()
    assert viewer.get(LIST, {lookup: "4"}).status_code == 400


def test_what_an_error_says_is_escaped(viewer: Client) -> None:
    (pk,) = make_messages(1, DEAD, error="<script>alert(1)</script>")
    page = viewer.get(detail(pk)).content.decode()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


# Finding and telling


def test_a_message_is_found_by_its_id_and_by_its_consumers_key(viewer: Client) -> None:
    first, _ = make_messages(2)
    message_id = OutboxMessage.objects.get(pk=first).message_id
    assert listed(viewer, q=str(message_id)) == [first]
    assert listed(viewer, q=f" {'0' * 32}.{message_id} ") == [first]
    assert listed(viewer, q=message_id.hex) == [first]
    assert listed(viewer, q="orders") == []
    assert len(listed(viewer, q=" ")) == 2


def test_what_waits_and_what_is_dead_is_filtered(viewer: Client) -> None:
    (due,) = make_messages(1)
    (waiting,) = make_messages(1, due=HOUR)
    (dead,) = make_messages(1, DEAD)
    (sent,) = make_messages(1, SENT, sent=-HOUR)
    found = {name: listed(viewer, state=name) for name in ("due", "waiting", "dead", "sent", "nonsense")}
    assert found == {
        "due": [due],
        "waiting": [waiting],
        "dead": [dead],
        "sent": [sent],
        "nonsense": [sent, dead, waiting, due],
    }


def test_each_state_is_told_in_words(viewer: Client) -> None:
    minute = timedelta(seconds=90)
    make_messages(1, due=-minute)
    make_messages(1, due=minute)
    make_messages(1, lease=minute)
    make_messages(1, lease=-minute)
    make_messages(1, DEAD)
    make_messages(1, SENT, sent=-minute)
    rows = list(reversed(viewer.get(LIST).context["cl"].result_list))
    shown = messages.OutboxMessageAdmin(OutboxMessage, messages.admin.site)
    assert [told(shown.current_state(row)) for row in rows] == [
        "pending, due",
        "pending, not due yet",
        "being sent",
        "pending, its relay disappeared",
        "dead",
        "sent",
    ]
    tries = [shown.next_try(row) for row in rows]
    assert tries[0] == "due for 1 min 30 s"
    assert tries[1] in {"in 1 min 30 s", "in 1 min 29 s"}
    assert tries[4:] == [display.NONE] * 2
    assert {shown.age(row) for row in rows} <= {"0 s", "1 s", "2 s"}
    assert "pending, due" in text(viewer.get(LIST))


def test_the_reason_is_shown(viewer: Client) -> None:
    (pk,) = make_messages(1, DEAD, error="ValueError: no such queue", attempts=16)
    assert "ValueError: no such queue" in text(viewer.get(detail(pk)))
    (fine,) = make_messages(1)
    assert f"Last error: {display.NONE}" in text(viewer.get(detail(fine)))


# Requeueing


def ask(client: Client, *pks: int) -> Any:
    return client.post(f"{LIST}?state=dead", {"action": "requeue", "_selected_action": pks})


def decide(client: Client, page: Any, **values: Any) -> list[str]:
    """Answer the page that asks: what the list says afterwards."""
    return said(client.post(f"{LIST}?state=dead", {**hidden_fields(page), **values}, follow=True))


def test_who_may_only_look_requeues_nothing(viewer: Client) -> None:
    (pk,) = make_messages(1, DEAD)
    assert "Requeue" not in text(viewer.get(LIST))
    form = {"action": "requeue", "_selected_action": [pk], "decided": "yes", "seen": f"{pk}:0:dead", "reason": "x"}
    viewer.post(LIST, form)
    assert statuses() == [("dead", 0)]


def test_a_dead_message_is_requeued_after_a_page_that_asks(operator: Client) -> None:
    first, second = make_messages(2, DEAD, attempts=16, error="no such queue <b>")
    page = ask(operator, first, second)
    assert "First correct what the error names" in text(page)
    assert "no such queue <b>" in text(page)
    assert page.content.decode().count('name="seen"') == 2
    assert statuses() == [("dead", 16)] * 2
    assert decide(operator, page, reason="queue made") == ["Requeue: 2 outbox messages."]
    assert statuses() == [("pending", 0)] * 2
    assert {entry.change_message for entry in LogEntry.objects.all()} == {"requeued: queue made"}
    assert "requeued: queue made" in text(operator.get(detail(first, "history")))


def test_what_has_become_of_a_message_meanwhile_is_said(operator: Client) -> None:
    dead, pending, gone = make_messages(3, DEAD)
    page = ask(operator, dead, pending, gone)
    OutboxMessage.objects.filter(pk=pending).update(status=PENDING)
    OutboxMessage.objects.filter(pk=gone).delete()
    answers = decide(operator, page, reason="queue made")
    assert len(answers) == 3
    assert [answer for answer in answers if "is not dead, or not any more" in answer]
    assert f"Outbox message {gone} is gone: it was purged." in answers
    assert answers[-1] == "Requeue: 1 outbox message."
    assert statuses() == [("pending", 0)] * 2


def test_the_page_of_a_dead_message_offers_to_requeue_it_and_comes_back(operator: Client) -> None:
    (pk,) = make_messages(1, DEAD, attempts=16)
    page = operator.get(detail(pk))
    assert "It was tried 16 times" in text(page)
    assert 'name="action" value="requeue"' in page.content.decode()
    question = operator.post(LIST, {"action": "requeue", **hidden_fields(page)})
    answer = operator.post(LIST, {**hidden_fields(question), "reason": "queue made"}, follow=True)
    assert answer.redirect_chain == [(detail(pk), 302)]
    assert statuses() == [("pending", 0)]
    assert 'name="action"' not in answer.content.decode()
    assert "It waits for a relay" in text(answer)


def test_a_message_that_was_sent_has_nothing_to_decide(operator: Client) -> None:
    (pk,) = make_messages(1, SENT, sent=-HOUR)
    page = operator.get(detail(pk))
    assert "Its broker has confirmed the message" in text(page)
    assert 'name="action"' not in page.content.decode()


def test_a_list_tells_in_one_column_how_often_a_message_was_tried_and_when_it_is_again(viewer: Client) -> None:
    make_messages(1, attempts=1, due=timedelta(seconds=90), account_id="alice", ordering_key="o-7")
    make_messages(1, DEAD, attempts=16)
    rows = text(viewer.get(LIST))
    assert re.search(
        r"pending, not due yet 1 try, in 1 min \d+ s orders.placed account alice, in the order of o-7", rows
    )
    assert "dead 16 tries orders.placed" in rows
