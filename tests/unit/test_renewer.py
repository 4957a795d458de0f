"""The thread that renews leases: its results and errors when it is slow, fails or can't be started."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from django.db import OperationalError

from idempotency import Operation
from idempotency.exceptions import UnavailableError
from idempotency.identity.scope import Scope
from idempotency.protocol import renewal
from idempotency.protocol.ownership import Ownership
from idempotency.protocol.renewal import Renewer, Task
from idempotency.store import Fence


@pytest.fixture
def owned():
    operation = Operation.declare("tests.renewed")
    fence = Fence(Scope("a", operation.name, "k"), 1, 1, "v1:0")
    store = SimpleNamespace(using="default", has_one_writer=False)
    return Ownership(operation.policy, fence, store, shares_connection=False)


@pytest.fixture
def renewing(monkeypatch):
    """Replace the renewing statement with a function."""
    return lambda statement: monkeypatch.setattr(renewal, "_set_lease_over_own_connection", statement)


def end(renewer):
    thread = renewer._thread
    if thread is not None:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_renewal_without_a_waiting_caller_is_not_made(owned, renewing, monkeypatch):
    released, made = threading.Event(), []

    def slow(renewed):
        made.append(renewed)
        return released.wait(timeout=30)

    renewing(slow)
    monkeypatch.setattr(renewal, "LONGEST_WAIT", renewal.LONGEST_WAIT / 1000)
    renewer = Renewer("default")
    while not made:  # before the thread runs, each renewal is abandoned
        with pytest.raises(UnavailableError):
            renewer.renew(owned)
    with pytest.raises(UnavailableError) as refused:
        renewer.renew(owned)
    assert refused.value.retry_after == 1
    assert renewer._thread.daemon  # it must not keep a process alive
    released.set()
    end(renewer)
    assert len(made) == 1


def test_a_renewal_that_fails_raises_its_error_for_the_caller(owned, renewing, monkeypatch):
    opened = []
    monkeypatch.setattr(renewal, "settings", lambda: SimpleNamespace(renewal_databases={"default": "renewals"}))
    monkeypatch.setattr(renewal, "open_own_connection", lambda using, entry: opened.append((using, entry)))
    renewing(Mock(side_effect=OperationalError("the database has gone")))
    renewer = Renewer("default")
    with pytest.raises(OperationalError, match="the database has gone"):
        renewer.renew(owned)
    end(renewer)
    renewing(lambda renewed: True)
    assert renewer.renew(owned)
    end(renewer)
    assert opened == [("default", "renewals")] * 2  # one connection for each thread


def test_without_a_thread_nothing_is_renewed_until_one_can_be_started(owned, renewing, monkeypatch, caplog):
    renewing(lambda renewed: True)
    renewer = Renewer("default")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        patch.setattr(renewal, "LONGEST_WAIT", 0.01)
        with pytest.raises(UnavailableError):
            renewer.renew(owned)
    assert [(entry.name, entry.message) for entry in caplog.records] == [("idempotency", "Leases can't be renewed")]
    assert renewer.renew(owned)
    end(renewer)


def test_a_renewal_after_the_end_of_its_attempt_has_no_effect_on_it(owned, renewing):
    task = Task(lambda: None)

    def ended_meanwhile(renewed):
        task.is_stopped = True
        return False

    renewing(ended_meanwhile)
    assert Renewer("default")._renew_for(owned, task) is None
    assert not owned.lost


@pytest.mark.django_db
def test_a_heartbeat_is_due_after_each_third_of_the_lease(owned, renewing, monkeypatch):
    renewing(lambda renewed: True)
    renewer = Renewer("default")
    monkeypatch.setattr(renewer, "_schedule", lambda task: None)
    lease = owned.policy.lease.total_seconds()
    now = 1000.0
    monkeypatch.setattr(renewal, "time", SimpleNamespace(monotonic=lambda: now))
    task = renewer.add(owned, cap=lease)
    assert (task.due, owned.held_until) == (now + lease / 3, now + lease)
    now += 30
    assert (task.work(), owned.held_until) == (now + lease / 3, now + lease)

    def take_five_seconds(renewed):
        nonlocal now
        now += 5
        return True

    renewing(take_five_seconds)
    began = now
    task.work()
    assert owned.held_until == began + lease  # because the database may have renewed it at once
    now -= 5
    renewing(Mock(side_effect=OperationalError("the database has gone")))
    held_until, now = owned.held_until, now + 1
    assert (task.work(), owned.held_until) == (now + lease / 3, held_until)
    now += lease - 31  # at the cap
    assert task.work() is None
    waits = []
    now = task.due - 0.5
    monkeypatch.setattr(renewer._changed, "wait", lambda seconds: waits.append(seconds) or renewer._tasks.clear())
    renewer._tasks.append(task)
    assert renewer._next() is None  # waits until the task is due
    assert (waits, renewer._thread) == ([0.5], None)


def test_a_heartbeat_ends_in_the_transaction_of_a_single_writer(owned, renewing, monkeypatch):
    """Its transaction would block the renewals, and each other attempt."""
    renewing(Mock(side_effect=OperationalError("database is locked")))
    renewer = Renewer("default")
    monkeypatch.setattr(renewer, "_schedule", lambda task: None)
    task = renewer.add(owned, cap=3600)
    owned.store.has_one_writer = True
    owned.held_until -= owned.policy.lease.total_seconds()
    assert (task.work(), owned.is_lost) == (None, False)
    owned.store.has_one_writer = False
    assert owned.is_lost


def test_an_ended_heartbeat_renews_and_loses_nothing(owned):
    with renewal.heartbeat(owned, timedelta(minutes=1)):
        assert owned.held_until is not None
    assert (renewal.renewer_of("default")._tasks, owned.held_until) == ([], None)


def test_a_stopped_heartbeat_is_not_scheduled_again(owned):
    renewer = Renewer("default")
    task = Task(lambda: None)
    renewer.stop(task)
    renewer._schedule(task)
    assert (renewer._tasks, renewer._thread) == ([], None)
