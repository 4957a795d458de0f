"""Erasure removes all of an account's data except unfinished work."""

import logging
import signal

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError

from idempotency import claim
from idempotency.lifecycle import Status
from idempotency.management import running
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate import erasure, resolutions
from idempotency.operate.erasure import erase_account, find_rows
from idempotency.outbox import publish, upkeep
from idempotency.outbox.models import MessageStatus, OutboxMessage
from tests.commands import run_command
from tests.database.statements import before_statement, explaining
from tests.outbox import SENDER, make_messages
from tests.records import HOUR, from_now, make_records

pytestmark = pytest.mark.django_db(transaction=True)


def erase(**options):
    """How many of alice's records and messages were erased, and what is left."""
    result, left = erase_account("alice", by="the test", **options)
    return result.records, result.messages, left


def operate(account_id, key="k"):
    """An operation that publishes a message, which is sent."""
    with claim("tests.erasure.order", account_id=account_id, key=key) as run:
        message = publish("orders.placed", sender=SENDER)
        run.result = None
    OutboxMessage.objects.filter(pk=message.pk).update(status=MessageStatus.SENT, sent_at=from_now(-HOUR))
    return message


def consume(message):
    """A consumer that records under the producer's account, as consumers do by default."""
    with claim("tests.erasure.mail", account_id=message.account_id, key=message.idempotency_key) as run:
        run.result = "to alice@example.test"


def test_an_erasure_requires_a_by_argument():
    make_records(1, Status.COMPLETED, account_id="alice")
    with pytest.raises(TypeError, match="by= must be a user"):
        erase_account("alice", by="")
    assert IdempotencyRecord.objects.count() == 1


def test_only_the_accounts_records_steps_and_messages_are_erased():
    for account_id in ("alice", "bob"):
        consume(operate(account_id))
        [record] = make_records(1, account_id=account_id)
        make_records(1, Status.RECOVERABLE, account_id=account_id)
        IdempotencyStep.objects.create(account_id=account_id, record_id=record, name="pay", result="{}")
    assert erase() == (4, 1, {})
    for rows, count in ((IdempotencyRecord.objects, 4), (IdempotencyStep.objects, 1), (OutboxMessage.objects, 1)):
        assert [*rows.values_list("account_id", flat=True)] == ["bob"] * count


def make_unfinished():
    make_records(1, Status.IN_PROGRESS, lease=HOUR, account_id="alice", attempt=2)
    make_records(2, Status.IN_PROGRESS, lease=-HOUR, account_id="alice")
    make_records(3, Status.PARKED, account_id="alice")
    make_messages(4, account_id="alice")
    make_messages(5, MessageStatus.DEAD, account_id="alice")


def test_live_and_undecided_rows_are_not_erased_by_default():
    make_unfinished()
    make_records(1, account_id="alice")
    assert erase() == (1, 0, {"live": 1, "abandoned": 2, "parked": 3, "pending": 4, "dead": 5})
    # A live claim may still have its effect, and a pending message is still to be sent.
    assert erase(include_unresolved=True) == (5, 5, {"live": 1, "pending": 4})


def test_rows_in_a_state_of_a_newer_release_are_left_and_counted():
    make_records(1, "sealed", account_id="alice")
    make_messages(2, "sealed", account_id="alice")
    left = {"unknown_records": 1, "unknown_messages": 2}
    assert erase() == (0, 0, left)
    assert erase(include_unresolved=True) == (0, 0, left)
    assert command() == (
        running.EXIT_ROWS_LEFT,
        [
            "Erased 0 records and 0 messages.",
            "Left: 1 record is in a state of a newer release. Finish the deploy, then run this again.",
            "Left: 2 messages are in a state of a newer release. Finish the deploy, then run this again.",
        ],
    )


def test_each_row_is_in_exactly_one_state_of_the_count():
    make_unfinished()
    for status in (*Status, "sealed"):
        make_records(1, status, account_id="alice")  # without a lease, even if it is a claim
    for status in (*MessageStatus, "sealed"):
        make_messages(1, status, account_id="alice")
    counts = find_rows("alice").count()
    assert sum(counts.values()) == IdempotencyRecord.objects.count() + OutboxMessage.objects.count()


def test_a_record_with_an_undelivered_message_is_left():
    """A relay that died before it marked a message leaves it pending and consumed; without the record it runs again."""
    message = operate("alice")
    OutboxMessage.objects.update(status=MessageStatus.PENDING)
    consume(message)
    assert erase() == (1, 0, {"finished": 1, "pending": 1})
    OutboxMessage.objects.update(status=MessageStatus.SENT)
    assert erase()[2] == {}


def test_batches_are_bounded_and_the_outbox_is_read_in_windows(monkeypatch):
    monkeypatch.setattr(upkeep, "WINDOW", 3)
    make_records(7, account_id="alice")
    make_messages(7, MessageStatus.SENT, account_id="alice")
    batches = erasure.erase_batches(find_rows("alice"), batch_size=3)
    found = [(batch.messages, batch.records, batch.touched) for batch in batches]
    assert found == [(3, 0, 3), (3, 0, 3), (1, 0, 1), (0, 3, 3), (0, 3, 3), (0, 1, 1)]


@pytest.mark.parametrize("before", ["SELECT", "DELETE"])
def test_a_record_claimed_between_search_and_deletion_is_left(before):
    """Before the batch selects it and, on a database that locks no rows, before it deletes it."""
    [pk] = make_records(1, Status.RECOVERABLE, account_id="alice")
    found = find_rows("alice")

    def take_over():
        IdempotencyRecord.objects.update(status=Status.IN_PROGRESS, lease_expires_at=from_now(HOUR))

    with before_statement(before, take_over):
        assert sum(batch.records for batch in erasure.erase_batches(found)) == 0
    assert IdempotencyRecord.objects.get().pk == pk


@pytest.mark.parametrize("account_id", ["", None, 7, "a\ud800", "a\0", "a" * 256], ids=ascii)
def test_an_account_that_no_record_can_have_is_refused(account_id):
    with pytest.raises(ValueError, match="account_id must be 1 to 255 printable characters"):
        find_rows(account_id)


def test_the_audit_records_the_erasure_without_naming_the_account(caplog, admin_user):
    make_unfinished()
    parked = IdempotencyRecord.objects.filter(status=Status.PARKED).latest("pk")
    resolutions.mark_not_executed(parked, by=admin_user, reason="ticket 1")
    with caplog.at_level(logging.INFO, logger="idempotency.audit"):
        erase(reason="ticket 7")
    assert "1 records, 0 messages; left: 1 live, 2 abandoned, 2 parked, 4 pending, 5 dead" in caplog.text
    assert "ticket 7" in caplog.text
    assert "alice" not in caplog.text
    entry = LogEntry.objects.get()
    assert "alice" not in entry.object_repr + entry.change_message


def command(account_id="alice", **options):
    return run_command("erase_idempotency", account_id, **options)[:2]


def test_the_command_erases_and_reports_what_is_left_and_why():
    operate("alice")
    assert command() == (0, ["Erased 1 record and 1 message."])
    make_unfinished()
    code, lines = command()
    assert code == running.EXIT_ROWS_LEFT
    assert lines == [
        "Erased 0 records and 0 messages.",
        "Left: 1 claim is live. Run this again when the lease is over.",
        "Left: 2 claims are abandoned. Run recover_idempotency first, or use --include-unresolved.",
        "Left: 3 records are parked. Resolve every parked record first, or use --include-unresolved.",
        "Left: 4 messages are not sent yet. Run relay_outbox first.",
        "Left: 5 messages are dead. Requeue every dead message first, or use --include-unresolved.",
    ]


@pytest.mark.parametrize(
    ("include", "first"),
    [(False, "Would erase 1 finished, 1 sent."), (True, "Would erase 1 parked, 1 finished, 1 sent.")],
)
def test_a_dry_run_counts_and_erases_nothing(include, first):
    options = {"dry_run": True, "include_unresolved": include}
    assert command(**options) == (0, ["Would erase nothing."])
    operate("alice")
    make_records(1, Status.PARKED, account_id="alice")
    code, lines = command(**options)
    assert (code, lines[0], len(lines)) == (0, first, 1 if include else 2)
    assert IdempotencyRecord.objects.count() == 2


def test_a_signal_ends_an_erasure_after_the_current_batch():
    make_messages(2, MessageStatus.SENT, account_id="alice")
    with (
        before_statement("DELETE FROM", lambda: signal.raise_signal(signal.SIGTERM)),
        pytest.raises(CommandError, match=r"Stopped by SIGTERM. Run it again") as ended,
    ):
        command(batch_size=1)
    assert ended.value.returncode == running.EXIT_SIGNAL + signal.SIGTERM
    assert OutboxMessage.objects.count() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"account_id": ""}, "account must be 1 to 255 printable"),
        ({"account_id": "a\ud800"}, "account must be 1 to 255 printable"),
        ({"batch_size": 501}, "--batch-size must be between 1 and 500"),
    ],
    ids=ascii,
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(CommandError, match=message) as refused:
        command(**options)
    assert refused.value.returncode == running.EXIT_USAGE


@pytest.mark.sqlite
@pytest.mark.failure_117
def test_each_statement_of_an_erasure_finds_its_rows_by_id():
    """SQLite prefers the index of scopes to a list of ids, and would read the whole account for each batch."""
    make_records(7, account_id="alice")
    with explaining(" IN (") as plans:
        assert erase(batch_size=3) == (7, 0, {})
    plans = [plan for plan in plans if "idempotency_record" in plan]
    assert len(plans) == 3 * 2 + 1  # a search and a deletion for each batch, and a count
    assert all(plan.startswith("SEARCH idempotency_record USING INTEGER PRIMARY KEY (rowid=?)") for plan in plans)
