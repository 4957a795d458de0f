"""Messages that a broker confirmed and then lost: their consumers have no record, so they are sent again."""

from datetime import timedelta

import pytest
from celery import shared_task
from django.db import connection, transaction

from idempotency import claim
from idempotency.contrib.celery import idempotent_task, lost, resend_lost_messages, tasks
from idempotency.models import IdempotencyRecord
from idempotency.operate.purge import purge_once
from idempotency.outbox import publish
from idempotency.outbox.models import MessageStatus, OutboxMessage
from testproject.celery import app
from tests.records import HOUR, MINUTE, from_now

pytestmark = pytest.mark.django_db(transaction=True)

TASK, CONSUMED, ELSEWHERE = "tests.lost.mail", "tests.lost.consumed", "tests.lost.unknown"
SHORT = "tests.lost.short"


@shared_task(name=TASK, acks_late=True, reject_on_worker_lost=True)
@idempotent_task("tests.lost.mail")
def mail(to: str) -> str:
    return to


@shared_task(name=CONSUMED, acks_late=True, reject_on_worker_lost=True)
@idempotent_task("tests.lost.consumed", consumer="mailer")
def consumed(to: str) -> str:
    return to


@pytest.fixture
def _short_retention():
    """A task whose retention is shorter than the broker's redelivery time. System checks warn about it."""

    # Not shared, because every app that another test makes would get it too, once for each of these tests.
    @app.task(name=SHORT, shared=False, acks_late=True, reject_on_worker_lost=True)
    @idempotent_task(SHORT, retention=HOUR)
    def short(to: str) -> str:
        return to

    yield
    app.tasks.unregister(SHORT)


def sent(topic=TASK, *, ago=HOUR, waited=MINUTE, **options):
    """A message that waited for a relay for ``waited`` and was sent ``ago``."""
    with transaction.atomic():
        message = publish(topic, {"to": "bob"}, **options)
    OutboxMessage.objects.filter(pk=message.pk).update(
        status=MessageStatus.SENT, attempts=1, sent_at=from_now(-ago), created_at=from_now(-ago - waited)
    )
    return message


def consume(message, operation, account):
    with claim(operation, account_id=account, key=message.idempotency_key) as run:
        run.result = None


def test_a_message_without_a_record_is_sent_again_under_its_id():
    message = sent()
    assert resend_lost_messages() == 1
    again = OutboxMessage.objects.get()
    assert (again.message_id, again.status, again.attempts) == (message.message_id, MessageStatus.PENDING, 0)
    assert again.next_try_at <= again.created_at + 2 * HOUR
    assert resend_lost_messages() == 0  # already pending


@pytest.mark.parametrize(("topic", "account"), [(TASK, "celery"), (CONSUMED, "mailer")])
def test_a_message_with_a_record_of_any_state_is_left_alone(topic, account):
    for _ in range(2):
        consume(sent(topic), topic, account)
    IdempotencyRecord.objects.filter(pk=IdempotencyRecord.objects.latest("pk").pk).update(status="in_progress")
    assert resend_lost_messages() == 0


@pytest.mark.failure_53
@pytest.mark.parametrize(("error", "found"), [(None, 1), ("ValueError: refused", 0)], ids=["cut off", "failed"])
def test_a_message_whose_consumer_was_cut_off_is_sent_again(error, found):
    """The broker may lose it on redelivery. A failed task was retried, or its message dead-lettered."""
    message = sent()
    consume(message, TASK, "celery")
    IdempotencyRecord.objects.update(status="recoverable", error=error)
    assert resend_lost_messages() == found


def test_a_record_of_another_consumer_does_not_count():
    message = sent()
    consume(message, "tests.lost.other", "celery")
    consume(message, TASK, "another account")
    assert resend_lost_messages() == 1


def test_a_message_of_an_operation_is_searched_under_its_account():
    with claim("tests.lost.producer", account_id="7", key="k"):
        message = publish(TASK, {"to": "bob"})
    OutboxMessage.objects.update(status=MessageStatus.SENT, sent_at=from_now(-HOUR), created_at=from_now(-HOUR))
    consume(message, TASK, "7")
    assert resend_lost_messages() == 0
    IdempotencyRecord.objects.filter(operation=TASK).delete()
    assert resend_lost_messages() == 1


def test_messages_sent_too_recently_or_too_long_ago_are_left_alone():
    sent(ago=MINUTE)
    sent(ago=timedelta(days=2))
    assert resend_lost_messages() == 0
    assert resend_lost_messages(older_than=timedelta(seconds=1)) == 1
    assert resend_lost_messages(look_back=timedelta(days=3)) == 1


def test_messages_to_other_consumers_are_left_alone():
    sent(ELSEWHERE)  # a task unknown to this process
    sent("idempotency.contrib.celery.tasks.relay_outbox")  # a task without records
    other = sent()
    OutboxMessage.objects.filter(pk=other.pk).update(sender="tests.outbox.broker")
    assert resend_lost_messages() == 0


def test_a_message_is_resent_after_as_long_as_it_waited_for_its_relay():
    """A queue whose workers are down must not fill up with duplicates."""
    sent(ago=HOUR, waited=2 * HOUR)
    assert resend_lost_messages() == 0
    OutboxMessage.objects.update(sent_at=from_now(-2 * HOUR), created_at=from_now(-4 * HOUR))
    assert resend_lost_messages() == 1


def test_the_search_covers_all_pages_even_within_one_marked_batch(monkeypatch):
    monkeypatch.setattr(lost, "PAGE", 3)
    for _ in range(5):
        sent()
    OutboxMessage.objects.update(sent_at=from_now(-HOUR))
    for minutes in range(1, 6):
        sent(ago=HOUR - minutes * MINUTE)
    consume(OutboxMessage.objects.order_by("pk")[2], TASK, "celery")
    assert resend_lost_messages() == 9
    assert OutboxMessage.objects.filter(status=MessageStatus.SENT).count() == 1


@pytest.mark.usefixtures("_short_retention")
@pytest.mark.failure_56
def test_a_message_whose_record_may_be_purged_is_not_sent_again():
    """It would be mistaken for a lost message, and the task would run again."""
    message = sent(SHORT, ago=2 * HOUR)
    consume(message, SHORT, "celery")
    IdempotencyRecord.objects.update(expires_at=from_now(-MINUTE))
    assert purge_once().deleted == 1
    assert resend_lost_messages() == 0
    sent(SHORT, ago=30 * MINUTE)
    assert resend_lost_messages() == 1


@pytest.mark.usefixtures("_short_retention")
@pytest.mark.failure_56
def test_the_age_of_a_message_sent_late_starts_when_it_was_written():
    """A relay may send a message and die before marking it. The message is consumed, and another relay resends it."""
    sent(SHORT, ago=40 * MINUTE, waited=25 * MINUTE)
    assert resend_lost_messages() == 0


@pytest.mark.usefixtures("_short_retention")
@pytest.mark.failure_56
@pytest.mark.parametrize(
    "meanwhile", [{"sent_at": from_now(-MINUTE)}, {"created_at": from_now(-HOUR)}], ids=["sent again", "forgotten"]
)
def test_a_message_that_changed_during_the_search_is_checked_again(meanwhile):
    sent(SHORT, ago=30 * MINUTE)
    slept = []

    def sleep(execute, sql, *arguments):
        if sql.startswith("UPDATE") and not slept:
            slept.append(sql)
            OutboxMessage.objects.update(**meanwhile)
        return execute(sql, *arguments)

    with connection.execute_wrapper(sleep):
        assert resend_lost_messages() == 0
    assert slept
    OutboxMessage.objects.update(sent_at=from_now(-30 * MINUTE), created_at=from_now(-30 * MINUTE))
    assert resend_lost_messages() == 1


def test_the_task_returns_the_number_of_messages_found():
    sent()
    assert tasks.resend_lost_messages(older_than=60.0) == {"found": 1}
