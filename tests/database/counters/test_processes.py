"""Counts add up over threads, forks and processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from idempotency.upkeep.counters import counters
from tests.commands import run_command
from tests.concurrency.racing import race
from tests.database import processes
from tests.database.counters.counting import CLAIMED, count, operation, written

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def _threads_take_turns() -> Iterator[None]:
    """Let the interpreter switch between threads wherever it may."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns")
@pytest.mark.parametrize("flushing", [False, True], ids=["counting", "counting and flushing"])
def test_no_count_is_lost_or_written_twice_between_threads(flushing: bool) -> None:
    receive = counters._receiver("claimed")

    def work() -> None:
        for _ in range(20):
            for _ in range(250):
                receive(operation)
            if flushing:
                counters.flush()

    race([work] * 8)
    counters.flush()
    assert written() == {CLAIMED: 40_000}


def test_a_forked_child_counts_from_nothing() -> None:
    count()
    reader, writer = os.pipe()
    with counters._lock, counters._flushing:  # as other threads may hold them at that moment
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            count(2)
            os.write(writer, str(counters._pending[CLAIMED]).encode())
            os._exit(0)
    assert os.read(reader, 10) == b"2"
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reader)
    os.close(writer)
    assert counters._pending == {CLAIMED: 1}


PROCESS = """
import os, sys, django
django.setup()
from idempotency import Operation, signals
from idempotency.upkeep.counters import counters
from idempotency.identity.scope import Scope

operation = Operation("tests.counters")
scope = Scope("1", operation.name, "k")

def count(times):
    for _ in range(times):
        signals.send(signals.claimed, operation, scope, 1)

"""


@pytest.mark.once
def test_the_counts_of_processes_and_of_their_forks_add_up_and_another_process_shows_them() -> None:
    """What a parent has counted before it forks, its child does not write as well."""
    script = PROCESS + "count(2); pid = os.fork(); count(0 if pid else int(sys.argv[1])); pid and os.waitpid(pid, 0)"
    for process in [processes.start(script, times) for times in ("3", "5")]:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    _, [shown], _ = run_command("idempotency_stats", json=True)
    assert json.loads(shown)["claims"] == {"value": 12, "kind": "recent"}


@pytest.mark.once
def test_a_process_that_ends_without_its_database_says_so_once_and_ends_well() -> None:
    process = processes.start(PROCESS + "count(2)", env={"DATABASE_URL": "postgres://nobody@/nothing?host=/nowhere"})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("The counters could not be written") == 1
