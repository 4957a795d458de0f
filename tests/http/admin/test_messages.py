"""The admin finds a message, shows its state and error, and requeues it. Payloads need a permission."""

import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry

from idempotency.outbox.models import MessageStatus, OutboxMessage
from tests.http.admin.pages import MESSAGES as LIST
from tests.http.admin.pages import choose, decide, detail, hidden_fields, listed, log_in, text
from tests.outbox import make_messages, statuses
from tests.records import HOUR, from_now

pytestmark = pytest.mark.django_db

DEAD_LIST = f"{LIST}?state=dead"
PENDING, SENT, DEAD = MessageStatus.PENDING, MessageStatus.SENT, MessageStatus.DEAD


@pytest.fixture
def viewer(client):
    return log_in(client, "view_outboxmessage")


@pytest.fixture
def operator(client):
    return log_in(client, "view_outboxmessage", "requeue_outboxmessage")


def found(client, **query):
    return [message.pk for message in listed(client, LIST, **query)]


def test_a_message_is_found_by_its_id_and_by_its_consumers_key(viewer):
    first, _ = make_messages(2)
    message_id = OutboxMessage.objects.get(pk=first).message_id
    assert found(viewer, q=str(message_id)) == [first]
    assert found(viewer, q=f" {'0' * 32}.{message_id} ") == [first]
    assert (found(viewer, q=message_id.hex), found(viewer, q="orders")) == ([first], [])
    assert len(found(viewer, q=" ")) == 2


def test_messages_are_filtered_by_state(viewer):
    made = {"due": make_messages(1), "waiting": make_messages(1, due=HOUR), "dead": make_messages(1, DEAD)}
    made["sent"] = make_messages(1, SENT, sent=-HOUR)
    assert {name: found(viewer, state=name) for name in made} == made
    assert found(viewer, state="nonsense") == [pk for pks in reversed(made.values()) for pk in pks]


def test_the_list_shows_each_state_in_words_and_the_next_try(viewer):
    soon = timedelta(seconds=90)
    for times in ({"due": -soon}, {"due": soon, "attempts": 1}, {"lease": soon}, {"lease": -soon}):
        make_messages(1, account_id="alice", **times)
    make_messages(1, DEAD, attempts=16)
    make_messages(1, SENT, sent=-soon)
    shown = text(viewer.get(LIST))
    for row in (
        r"pending, due due for 1 min \d+ s orders.placed account alice",
        r"pending, not due yet 1 try, in 1 min \d+ s orders.placed account alice",
        r"being sent .*? orders.placed account alice",
        r"pending, its relay disappeared .*? orders.placed account alice",
        "dead 16 tries orders.placed",
        "sent orders.placed",
    ):
        assert re.search(row, shown), (row, shown)


@pytest.mark.failure_83
@pytest.mark.parametrize("may_read", [False, True])
def test_the_question_shows_the_error_to_those_who_may_see_payloads(client, may_read):
    log_in(client, "view_outboxmessage", "requeue_outboxmessage", *(["view_payload"] if may_read else []))
    (pk,) = make_messages(1, DEAD, attempts=16, error="no such card: 4242 <b>")
    page = choose(client, "requeue", pk, url=DEAD_LIST)
    assert ("no such card: 4242 <b>" in text(page)) is may_read
    again = client.post(LIST, {**hidden_fields(page), "reason": ""})
    assert ("no such card: 4242 <b>" in text(again)) is may_read


def test_a_dead_message_is_requeued_after_a_confirmation(operator):
    first, second, pending = make_messages(3, DEAD, attempts=16)
    page = choose(operator, "requeue", first, second, pending, url=DEAD_LIST)
    assert "First correct the cause of the error" in text(page)
    assert page.content.decode().count('name="seen"') == 3
    assert statuses() == [("dead", 16)] * 3
    OutboxMessage.objects.filter(pk=pending).update(status=PENDING)  # by another operator
    answers = decide(operator, page, DEAD_LIST, reason="queue made")
    assert "is not dead, or has changed" in answers[0]
    assert answers[1:] == ["Requeue: 2 outbox messages."]
    assert statuses() == [("pending", 0), ("pending", 0), ("pending", 16)]
    assert {entry.change_message for entry in LogEntry.objects.all()} == {"requeued: queue made"}
    assert "requeued: queue made" in text(operator.get(detail(first, "history", "outboxmessage")))


def test_the_page_of_a_dead_message_offers_to_requeue_it_and_returns(operator):
    (pk,) = make_messages(1, DEAD, attempts=16)
    page = operator.get(detail(pk, model="outboxmessage"))
    assert "It was tried too often" in text(page)
    assert 'name="action" value="requeue"' in page.content.decode()
    question = operator.post(LIST, {"action": "requeue", **hidden_fields(page)})
    answer = operator.post(LIST, {**hidden_fields(question), "reason": "queue made"}, follow=True)
    assert answer.redirect_chain == [(detail(pk, model="outboxmessage"), 302)]
    assert statuses() == [("pending", 0)]
    OutboxMessage.objects.update(status=SENT, sent_at=from_now(-HOUR))
    sent = operator.get(detail(pk, model="outboxmessage"))
    for shown, explanation in ((answer, "It waits for a relay"), (sent, "Its broker has confirmed the message")):
        assert explanation in text(shown)
        assert 'name="action"' not in shown.content.decode()
