"""``manage.py relay_outbox``: its arguments, its report, its exit codes. The purge of messages in the other command."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import OperationalError, connection

from idempotency.exceptions import BrokerUnavailableError
from idempotency.management.commands import relay_outbox
from idempotency.models import IdempotencyRecord, MessageStatus, OutboxMessage
from idempotency.protocol.faults import armed
from tests.commands import Terminal, run_command, wrong_arguments
from tests.outbox import OTHER_SENDER, broker, make_due, make_messages, other_broker, statuses
from tests.records import HOUR, make_records

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)
UNREACHABLE = BrokerUnavailableError("no route")


@pytest.fixture(autouse=True)
def _empty_brokers() -> None:
    broker.reset()
    other_broker.reset()


def run(command: str = "relay_outbox", **options: Any) -> tuple[int, list[str], list[str]]:
    return run_command(command, **options)


@pytest.fixture
def at_batch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Call something in the middle of a batch of a number."""

    def at_batch(number: int, call: Callable[[], None]) -> None:
        reached = 0

        def claimed() -> None:
            nonlocal reached
            reached += 1
            if reached == number:
                call()

        monkeypatch.setitem(armed, "relay.claimed", claimed)

    return at_batch


# What it does


def test_it_sends_what_is_due_and_says_so() -> None:
    make_messages(1_234)
    assert run() == (0, ["Sent 1,234 messages."], [])
    assert len(broker.deliveries) == 1_234
    assert run() == (0, ["Sent 0 messages."], [])


def test_it_tells_what_became_of_the_rest() -> None:
    make_messages(3)
    make_messages(1, payload='"dies"', attempts=15)
    make_messages(2, ordering_key="a", payload='"refused"')
    broker.refuse("dies", "refused", error=ValueError("no such queue"))
    assert run() == (0, ["Sent 3 messages, 1 to be tried again, 1 not tried, 1 dead."], [])


def test_a_broker_that_can_not_be_reached_has_an_exit_code_of_its_own() -> None:
    make_messages(2)
    make_messages(1, sender=OTHER_SENDER)
    broker.refuse(0, 1, error=UNREACHABLE)
    told = "Sender tests.outbox.broker can't reach its broker: BrokerUnavailableError: no route"
    assert run() == (5, ["Sent 1 message, 2 not tried."], [told])
    make_due()
    assert run(verbosity=0) == (5, [], [told])


def test_a_dry_run_counts_and_sends_nothing() -> None:
    assert run(dry_run=True) == (0, ["0 messages pending, of which 0 can be sent now.", "0 messages dead."], [])
    make_messages(2, due=-HOUR)
    make_messages(3, due=HOUR)
    make_messages(2, due=-HOUR, ordering_key="a")
    make_messages(1, MessageStatus.DEAD)
    code, (pending, due, dead), errors = run(dry_run=True)
    assert (code, errors) == (0, [])
    assert pending == "7 messages pending, of which 3 can be sent now."
    assert due.startswith("Due for 3,6")
    assert dead == "1 message dead."
    assert broker.deliveries == []


def test_a_run_stops_after_its_last_batch_and_tells_that_work_may_be_left() -> None:
    make_messages(5)
    assert run(batch_size=2, max_batches=2) == (
        3,
        ["Sent 4 messages.", "Stopped by --max-batches 2. More may be due."],
        [],
    )
    assert run(batch_size=2, max_batches=2, verbosity=0) == (0, [], [])
    make_messages(5)
    assert run(batch_size=2, max_batches=2, verbosity=0) == (3, [], [])


def test_a_verbose_run_reports_each_batch_and_a_long_one_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    make_messages(3)
    expected = ["So far: Sent 2 messages.", "So far: Sent 3 messages.", "Sent 3 messages."]
    assert run(batch_size=2, verbosity=2)[1] == expected
    make_messages(3)
    monkeypatch.setattr(relay_outbox, "REPORT_EVERY", 0.0)
    assert run(batch_size=2)[1] == expected


def test_a_terminal_sees_a_bar() -> None:
    pytest.importorskip("rich", reason="the bar is drawn by rich, which this environment doesn't have")
    make_messages(3)
    terminal = Terminal()
    assert run(stderr=terminal, batch_size=2)[1] == ["Sent 3 messages."]
    assert "Sending" in terminal.getvalue()
    quiet = Terminal()
    assert run(stderr=quiet, verbosity=0)[1] == []
    assert quiet.getvalue() == ""


def test_without_rich_a_terminal_sees_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    make_messages(1)
    terminal = Terminal()
    assert run(stderr=terminal, verbosity=2)[1][0] == "So far: Sent 1 message."
    assert terminal.getvalue() == ""


@wrong_arguments(largest_batch=500)
def test_a_wrong_argument_is_named_and_nothing_is_done(options: dict[str, Any], message: str) -> None:
    make_messages()
    with pytest.raises(CommandError, match=message) as refused:
        run(**options)
    assert refused.value.returncode == 2
    assert broker.deliveries == []


def test_the_help_lists_the_exit_codes_and_the_default_pause(capsys: pytest.CaptureFixture[str]) -> None:
    parser = relay_outbox.Command().create_parser("manage.py", "relay_outbox")
    assert parser.parse_args(["--watch"]).watch == relay_outbox.DEFAULT_WATCH
    assert parser.parse_args(["--watch", "2.5"]).watch == 2.5
    assert parser.parse_args([]).watch is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    assert "exit codes:\n  0    everything that was due is sent" in text
    assert "5    a broker can't be reached" in text
    assert "130  interrupted, 143 terminated" in text


def test_a_database_that_refuses_is_an_error_with_its_own_code(at_batch: Any) -> None:
    def refuse() -> None:
        raise OperationalError("no route to host")

    make_messages(4)
    at_batch(2, refuse)
    with pytest.raises(CommandError, match=r"'default' refused: no route to host\nWhat was sent") as refused:
        run(batch_size=2, database="default")
    assert refused.value.returncode == 1
    assert statuses() == [("sent", 1)] * 2 + [("pending", 1)] * 2


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_the_batch_in_hand(signum: signal.Signals, code: int, at_batch: Any) -> None:
    make_messages(6)
    at_batch(2, lambda: signal.raise_signal(signum))
    with pytest.raises(CommandError, match=rf"Stopped by {signum.name}\. More may be due") as stopped:
        run(batch_size=2)
    assert stopped.value.returncode == code
    assert statuses() == [("sent", 1)] * 4 + [("pending", 0)] * 2


# Again and again


def test_it_watches_until_it_is_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later run sends; an unreachable broker, which is news once; and silence where there is none."""
    make_messages(1)
    pauses = 0

    def sleep(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            make_messages(2)
        elif pauses in {3, 4}:
            broker.refuse("unreachable", error=UNREACHABLE)
            make_messages(1, payload='"unreachable"')
        elif pauses == 5:
            broker.reset()
            make_due()
        elif pauses == 6:
            signal.raise_signal(signal.SIGTERM)

    # One slice of sleep a pause, so that each is a run of its own.
    clock = iter(range(10_000))
    monkeypatch.setattr(
        "idempotency.management.running.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=sleep)
    )
    code, lines, errors = run(watch=1.5)
    assert code == 0
    assert lines == ["Sent 1 message.", "Sent 2 messages.", "Sent 2 messages."]
    assert errors == ["Sender tests.outbox.broker can't reach its broker: BrokerUnavailableError: no route"]


def test_a_verbose_watch_tells_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    assert run(watch=1.0, verbosity=2)[1][-1] == "Sent 0 messages."
    assert run(watch=1.0)[1] == []
    make_messages(1)
    assert run(watch=1.0, verbosity=0)[1] == []


def test_a_watch_outlives_a_database_that_refuses_for_a_while(monkeypatch: pytest.MonkeyPatch, at_batch: Any) -> None:
    def refuse() -> None:
        make_due()  # what it had taken will be free again some time
        raise OperationalError("terminating connection due to administrator command")

    def sleep(seconds: float) -> None:
        make_due()
        if statuses() == [("sent", 2)]:
            signal.raise_signal(signal.SIGTERM)

    make_messages(1)
    at_batch(1, refuse)
    monkeypatch.setattr(time, "sleep", sleep)
    code, lines, errors = run(watch=0.01)
    assert (code, lines) == (0, ["Sent 1 message."])
    assert errors == ["Database 'default' refused: terminating connection due to administrator command"]


# The purge


def purge(**options: Any) -> tuple[int, list[str]]:
    code, lines, _ = run("purge_idempotency", **options)
    return code, lines


@pytest.fixture
def _old_rows() -> None:
    make_records(3)
    make_messages(5, MessageStatus.SENT, sent=-4 * DAY)
    make_messages(1, MessageStatus.SENT, sent=-HOUR)
    make_messages(1, MessageStatus.DEAD, due=-4 * DAY)
    make_messages(1, due=-4 * DAY)


@pytest.mark.usefixtures("_old_rows")
def test_sent_messages_are_purged_after_the_records_and_counted_by_themselves() -> None:
    assert purge(dry_run=True) == (
        0,
        ["Would purge 3 records from database 'default'.", "Would purge 5 sent messages from database 'default'."],
    )
    assert purge() == (
        0,
        ["Purged 3 records from database 'default'.", "Purged 5 sent messages from database 'default'."],
    )
    assert sorted(status for status, _ in statuses()) == ["dead", "pending", "sent"]
    assert purge() == (0, ["Purged 0 records from database 'default'."])


@pytest.mark.usefixtures("_old_rows")
def test_the_batches_of_a_purge_are_counted_for_each() -> None:
    assert purge(batch_size=2, max_batches=2) == (
        3,
        [
            "Purged 3 records from database 'default'.",
            "Purged 4 sent messages from database 'default'.",
            "Stopped by --max-batches 2. More is due.",
        ],
    )
    assert purge(batch_size=1, verbosity=2) == (
        0,
        [
            "Purged 0 records so far.",
            "Purged 0 records from database 'default'.",
            "Purged 1 sent message so far.",
            "Purged 1 sent message so far.",
            "Purged 1 sent message from database 'default'.",
        ],
    )
    assert OutboxMessage.objects.count() == 3


@pytest.mark.usefixtures("_old_rows")
def test_a_signal_ends_a_purge_before_its_messages() -> None:
    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "DELETE FROM" in sql and not calls:
            calls.append(1)
            signal.raise_signal(signal.SIGTERM)
        return execute(sql, params, many, context)

    calls: list[int] = []
    with connection.execute_wrapper(wrapper), pytest.raises(CommandError, match="Stopped by SIGTERM") as stopped:
        purge()
    assert stopped.value.returncode == 143
    assert OutboxMessage.objects.count() == 8
    assert IdempotencyRecord.objects.count() == 0
