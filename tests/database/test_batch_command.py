"""What the commands share: options, reports, signals, ``--watch``, refusals and exit codes."""

import itertools
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections

from idempotency.management import running
from idempotency.management.commands import purge_idempotency, recover_idempotency
from idempotency.management.running import BatchCommand, Work
from idempotency.operate.batches import BatchResult, in_batches
from idempotency.outbox.management.commands import relay_outbox
from tests.commands import run_command
from tests.concurrency.racing import elsewhere

# Each command's effects on the database are tested in a separate file.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

COMMANDS = {
    "purge_idempotency": (purge_idempotency.Command, 10_000),
    "recover_idempotency": (recover_idempotency.Command, 10_000),
    "relay_outbox": (relay_outbox.Command, 500),
}
#: The commands with ``--watch``.
WATCHING = {name: known for name, known in COMMANDS.items() if known[0].default_watch is not None}


@dataclass
class Eaten(BatchResult):
    count: int = 0

    @property
    def touched(self):
        return self.count


class Eat(BatchCommand[Eaten]):
    """Eats apples in batches. Each batch may be disturbed."""

    batch_of = "apples to eat at once"
    default_batch = 2
    largest_batch = 10
    default_watch = 3.0
    refused = "What was eaten stays eaten."
    exit_code = 7

    def __init__(self):
        super().__init__()
        self.apples = 0
        self.worms = []
        self.batches = 0
        #: Called in each batch with its number.
        self.disturb = lambda number: None

    def works(self):
        yield Work(self._eat(), lambda eaten: f"Eaten {eaten.count}.")

    def _eat(self):
        def take():
            self.batches += 1
            self.disturb(self.batches)
            eaten = min(self.apples, self.batch_size)
            self.apples -= eaten
            return Eaten(eaten, exhausted=eaten < self.batch_size)

        return in_batches(take)

    def complaints(self, result):
        return {**super().complaints(result), **{worm: f"Worm {worm}." for worm in self.worms}}

    def count(self):
        self.write(f"{self.apples} apples.")


@pytest.fixture
def eat():
    return Eat()


def run(command, apples=0, **options):
    command.apples += apples
    return run_command(command, **options)


def test_a_run_takes_batches_until_nothing_is_due_and_reports_once(eat):
    assert run(eat, 5) == (0, ["Eaten 5."], [])
    assert eat.batches == 3
    assert run(eat) == (0, ["Eaten 0."], [])


def test_a_dry_run_counts(eat):
    assert run(eat, 5, dry_run=True) == (0, ["5 apples."], [])
    assert eat.batches == 0


def test_a_verbose_run_and_a_long_one_report_their_batches(eat, monkeypatch):
    lines = ["So far: Eaten 2.", "Eaten 3."]
    assert run(eat, 3, verbosity=2)[1] == lines
    assert run(eat, 3)[1] == lines[-1:]
    monkeypatch.setattr(running, "REPORT_EVERY", 0.0)
    assert run(eat, 3)[1] == lines
    assert run(eat, 3, verbosity=0) == (0, [], [])


def test_complaints_have_a_separate_exit_code_and_are_never_silenced(eat):
    eat.worms = ["a", "b"]
    assert run(eat, 1) == (7, ["Eaten 1."], ["Worm a.", "Worm b."])
    assert run(eat, 1, verbosity=0) == (7, [], ["Worm a.", "Worm b."])
    eat.disturb = raise_in(3, signal.SIGTERM)
    with pytest.raises(CommandError) as stopped:
        run(eat, 5)
    assert stopped.value.returncode == 143, "a signal takes precedence"


#: Each command's arguments, and the consequence that it reports if the database refuses.
CALLS = {
    "purge_idempotency": ([], "Earlier batches stay done."),
    "recover_idempotency": ([], "Earlier batches stay done."),
    "relay_outbox": ([], "Messages that were sent but not marked are sent again."),
    "erase_idempotency": (["alice"], "Earlier batches stay done."),
    "idempotency_stats": ([], ""),
}


@pytest.mark.failure_29
@pytest.mark.parametrize("name", CALLS)
def test_a_database_that_refuses_is_an_error_with_its_own_code(name):
    arguments, consequence = CALLS[name]
    refuse = Mock(side_effect=OperationalError("the disk is full\n"))
    with connection.execute_wrapper(refuse), pytest.raises(CommandError) as refused:
        run_command(name, *arguments)
    assert str(refused.value) == f"Database 'default' refused: the disk is full\n{consequence}".strip()
    assert refused.value.returncode == 1


@pytest.mark.parametrize("database", ["nowhere", ""])
@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_database_is_named(name, database):
    with pytest.raises(CommandError, match=f"--database: there is no database '{database}'") as refused:
        run_command(name, *CALLS[name][0], database=database)
    assert refused.value.returncode == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_reads_and_bounds_its_batches(name):
    command, largest = COMMANDS[name]
    parsed = command().create_parser("manage.py", name).parse_args(["--batch-size", "7"])
    assert parsed.batch_size == 7
    with pytest.raises(CommandError, match=f"--batch-size must be between 1 and {largest}"):
        run_command(name, batch_size=largest + 1)
    assert run_command(name, batch_size=largest)[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be between 1 and 10"),
        ({"batch_size": 11}, "--batch-size must be between 1 and 10"),
        ({"watch": 0.0}, "--watch must be above 0"),
        ({"watch": float("nan")}, "--watch must be above 0"),
        ({"watch": 3601.0}, "--watch must be above 0 and up to 3600 seconds"),
        ({"watch": 1.0, "dry_run": True}, "--watch and --dry-run exclude each other"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_and_nothing_is_done(eat, options, message):
    with pytest.raises(CommandError, match=message) as refused:
        run(eat, 1, **options)
    assert (refused.value.returncode, eat.apples) == (2, 1)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_lists_the_exit_codes(name):
    text = COMMANDS[name][0]().create_parser("manage.py", name).format_help()
    assert "Exit codes: 0 done, 1 the database refused" in " ".join(text.split())


@pytest.mark.parametrize("name", WATCHING)
def test_a_watch_has_a_default_pause(name):
    command, _ = COMMANDS[name]
    parse = command().create_parser("manage.py", name).parse_args
    pauses = [parse(arguments).watch for arguments in (["--watch"], ["--watch", "2.5"], [])]
    assert pauses == [command.default_watch, 2.5, None]


def test_the_purge_has_no_watch():
    with pytest.raises(CommandError, match="unrecognized arguments: --watch"):
        call_command("purge_idempotency", "--watch")


def raise_in(batch, signum):
    return lambda number: signal.raise_signal(signum) if number == batch else None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_the_current_batch(eat, signum, code):
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    eat.disturb = raise_in(2, signum)
    with pytest.raises(CommandError, match=rf"Stopped by {signum.name}\. More may be due") as stopped:
        run(eat, 6)
    assert (stopped.value.returncode, eat.apples) == (code, 2)
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers


@pytest.fixture
def _handlers_stay():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("_handlers_stay")
def test_a_second_signal_has_its_usual_effect(eat):
    # The tests may run in a process that ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    eat.disturb = lambda number: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run(eat, 3)
    assert eat.apples == 3


@pytest.mark.usefixtures("_handlers_stay")
def test_a_handler_installed_outside_python_becomes_the_default(monkeypatch):
    install = signal.signal
    monkeypatch.setattr(signal, "signal", lambda signum, handler: install(signum, handler) and None)
    with running.Stop():
        pass
    assert {signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)} == {signal.SIG_DFL}


def test_a_command_runs_in_a_thread_without_signal_handlers(eat):
    assert elsewhere(lambda: run(eat, 3)) == (0, ["Eaten 3."], [])


def test_a_watch_runs_until_a_signal(eat, monkeypatch):
    """It does work that falls due later, is silent without work, and reports complaints only if they change."""
    happens = {
        2: lambda: vars(eat).update(apples=3, worms=["a"]),
        4: lambda: vars(eat).update(worms=["a", "b"]),
        6: lambda: vars(eat).update(worms=[]),
        7: lambda: signal.raise_signal(signal.SIGTERM),
    }
    pauses = itertools.count(1)
    # One slice of sleep per pause, so that a run follows each sleep.
    time = SimpleNamespace(
        monotonic=itertools.count().__next__, sleep=lambda seconds: happens.get(next(pauses), lambda: None)()
    )
    monkeypatch.setattr(running, "time", time)
    assert run(eat, 1, watch=1.5) == (0, ["Eaten 1.", "Eaten 3."], ["Worm a.", "Worm a.", "Worm b."])


def test_a_pause_is_slept_in_slices_so_that_a_signal_ends_it(eat, monkeypatch):
    clock = 0.0

    def sleep(seconds):
        nonlocal clock
        assert 0 < seconds <= running.SLICE
        clock += seconds
        if clock > 15:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    assert run(eat, 1, watch=10.0)[0] == 0
    assert eat.batches == 2
    assert clock == pytest.approx(15, abs=2 * running.SLICE)


def test_a_verbose_watch_reports_each_run(eat, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    assert run(eat, watch=1.0, verbosity=2)[1][-1] == "Eaten 0."
    assert run(eat, watch=1.0)[1] == []
    assert run(eat, 1, watch=1.0, verbosity=0)[1] == []


def test_a_watch_survives_a_temporary_refusal_by_the_database(eat, monkeypatch):
    eat.disturb = Mock(side_effect=[OperationalError("terminating connection"), None])
    monkeypatch.setattr(time, "sleep", lambda seconds: eat.apples or signal.raise_signal(signal.SIGTERM))
    close = Mock()
    monkeypatch.setattr(connections["default"], "close", close)
    refused = "Database 'default' refused: terminating connection"
    assert run(eat, 1, watch=0.01) == (0, ["Eaten 1."], [refused])
    assert close.call_count == 1, "the connection may be broken"
