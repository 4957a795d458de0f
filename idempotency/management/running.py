"""The base of the commands: exit codes, stopping on a signal, progress, and the class ``BatchCommand``."""

from __future__ import annotations

import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import Any, ClassVar, Generic, Self, TextIO, TypeVar

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import DatabaseError, connections
from django.db.models import QuerySet

from ..operate.batches import BatchResult
from ..store import records_database

_Result = TypeVar("_Result", bound=BatchResult)

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_WORK_LEFT = 3
EXIT_UNKNOWN_OPERATIONS = 4
EXIT_SIGNAL = 128  # plus the signal's number, as shells do

# Python resumes a sleep after a signal was handled. So a pause is slept in slices of this length.
SLICE = 0.2  # seconds

MAX_PAUSE = 3600.0  # seconds

#: Without a terminal, a line at this interval shows in the log that a long run is alive.
REPORT_EVERY = 10.0  # seconds

#: A function that is called with the number of rows done so far, and with a line that says so.
Report = Callable[[int, str], None]


def describe_exit_codes(meanings: Mapping[int, str], more: str = "") -> str:
    """The end of the help of a command that works in batches: the usual exit codes, and ``meanings`` that differ."""
    codes = {
        EXIT_REFUSED: "the database refused; earlier batches stay done",
        EXIT_USAGE: "an argument is wrong, nothing was done",
        EXIT_WORK_LEFT: "stopped by --max-batches, and more is due",
        **meanings,
    }
    lines = [f"  {code:<4} {meaning}" for code, meaning in sorted(codes.items())]
    interrupted, terminated = EXIT_SIGNAL + signal.SIGINT, EXIT_SIGNAL + signal.SIGTERM
    lines.append(f"  {interrupted:<4} interrupted, {terminated} terminated: after the current batch")
    return "\n".join(["exit codes:", *lines, *(["", more] if more else [])])


class HelpFormatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the epilog."""


class ExplainedCommand(BaseCommand):
    """Its help ends with its exit codes."""

    epilog: ClassVar[str]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs = {"epilog": self.epilog, "formatter_class": HelpFormatter, **kwargs}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def write(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


class Stop(ExitStack):
    """Within its block, remembers the first SIGINT or SIGTERM instead of ending the process, so that the command ends
    between two batches. A second signal has its usual effect.
    """

    signum: int | None = None

    def __enter__(self) -> Self:
        # Python handles signals in the main thread only. In another thread the process's own handlers remain in force.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                previous = signal.signal(signum, self._note)  # None if it was not installed from Python
                self.callback(signal.signal, signum, previous or signal.SIG_DFL)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.close()  # puts the handlers back

    def sleep(self, seconds: float) -> bool:
        """:returns: whether to go on, because no signal has arrived."""
        end = time.monotonic() + seconds
        while self.signum is None and (left := end - time.monotonic()) > 0:
            # An Event could not end it: the signal's handler may interrupt Event.wait() while that holds the lock.
            time.sleep(min(left, SLICE))  # the pause between two rounds of --watch; a signal ends it after a slice
        return self.signum is None

    def end_command(self, left: str) -> None:
        """End the command if a signal has arrived. ``left`` is a sentence about the work that is left."""
        if self.signum is not None:
            name = signal.Signals(self.signum).name
            raise CommandError(f"Stopped by {name}. {left}", returncode=EXIT_SIGNAL + self.signum)


def counted(count: int, name: str) -> str:
    return f"1 {name}" if count == 1 else f"{count:,} {name}s"


def require(is_right: bool, message: str) -> None:
    """End the command with a message if an argument is wrong. call_command() does not parse the values it is given."""
    if not is_right:
        raise CommandError(message, returncode=EXIT_USAGE)


def add_batch_size(parser: CommandParser, of_what: str, default: int, largest: int) -> None:
    text = f"{of_what}, up to {largest} (default: %(default)s)"
    parser.add_argument("--batch-size", type=int, default=default, metavar="N", help=text)


def check_batch_size(batch_size: int, largest: int) -> None:
    require(1 <= batch_size <= largest, f"--batch-size must be between 1 and {largest}.")


def check_database(using: str) -> None:
    require(using in connections, f"--database: there is no database {using!r} in DATABASES.")


def refusal(using: str, error: DatabaseError) -> str:
    return f"Database {using!r} refused: {str(error).strip()}"


@contextmanager
def refusals_as_errors(using: str, consequence: str = "Earlier batches stay done.") -> Iterator[None]:
    """If the database refuses, end the command with a message. ``consequence`` is a sentence about its work."""
    try:
        yield
    except DatabaseError as error:
        raise CommandError(f"{refusal(using, error)}\n{consequence}".strip(), returncode=EXIT_REFUSED) from error


@dataclass
class Work(Generic[_Result]):
    """The rows of one kind that a run works on."""

    #: The label of the bar.
    label: str
    batches: Iterator[_Result]
    #: The rows that are due.
    due: QuerySet[Any]
    #: Turns a result into a sentence.
    describe: Callable[[_Result], str]


class BatchCommand(ExplainedCommand, ABC, Generic[_Result]):
    """Takes bounded batches until nothing more is due: once, or again and again with ``--watch``.

    A signal stops it between two batches. A subclass defines its batches and describes their results.
    """

    #: For the help: the rows of a batch, and its default and largest size.
    batch_of: ClassVar[str]
    default_batch: ClassVar[int]
    largest_batch: ClassVar[int]
    #: The default pause of ``--watch`` in seconds; None if the command has no ``--watch``.
    default_watch: ClassVar[float | None] = None
    #: A sentence about the work if the database refuses.
    refused: ClassVar[str] = "Earlier batches stay done."
    #: The exit code of a run that had complaints.
    exit_code: ClassVar[int] = EXIT_REFUSED

    using: str
    #: Seconds between two batches.
    pause: float = 0.0

    def default_database(self) -> str:
        """The alias of the database, unless ``--database`` names another one."""
        return records_database()

    @abstractmethod
    def works(self) -> Iterator[Work[_Result]]:
        """The work of a run: one for each kind of rows."""

    @abstractmethod
    def count(self) -> None:
        """Carry out ``--dry-run``: count, and change nothing."""

    def complaints(self, result: _Result) -> Mapping[str, str]:
        """The faults that a run has met.

        :returns: sentences, each under a key. With ``--watch`` they are written only if the keys differ from the run
            before.
        """
        return {}

    def add_arguments(self, parser: CommandParser) -> None:
        add_batch_size(parser, self.batch_of, self.default_batch, self.largest_batch)
        parser.add_argument("--max-batches", type=int, metavar="N", help="stop a run after N batches (default: none)")
        parser.add_argument("--dry-run", action="store_true", help="count what is due, and change nothing")
        if self.default_watch is not None:
            watch = "run again and again, with this pause between (default: %(const)g)"
            parser.add_argument(
                "--watch", type=float, nargs="?", const=self.default_watch, metavar="SECONDS", help=watch
            )
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that the rows are written to")

    def handle(self, *args: object, **options: Any) -> None:
        watch, dry_run = options.get("watch"), options["dry_run"]
        self.options: dict[str, Any] = options
        self.verbosity: int = options["verbosity"]
        self.batch_size: int = options["batch_size"]
        self.max_batches: int | None = options["max_batches"]
        check_batch_size(self.batch_size, self.largest_batch)
        require(self.max_batches is None or self.max_batches >= 1, "--max-batches must be 1 or more.")
        is_pause = watch is None or 0 < watch <= MAX_PAUSE
        require(is_pause, f"--watch must be above 0 and up to {MAX_PAUSE:.0f} seconds.")
        require(watch is None or not dry_run, "--watch and --dry-run exclude each other.")
        self.using = self.default_database() if options["database"] is None else options["database"]
        check_database(self.using)
        with refusals_as_errors(self.using, self.refused):
            if dry_run:
                self.count()
            elif watch is None:
                self._run_once()
            else:
                self._run_again_and_again(watch)

    def _run_once(self) -> None:
        left: list[QuerySet[Any]] = []
        complaints: dict[str, str] = {}
        with Stop() as stop:
            for work in self.works():
                if stop.signum is not None:
                    left.append(work.due)
                    continue
                result = self.take(work, stop)
                complaints |= self.complaints(result)
                if self.verbosity:
                    self.write(work.describe(result))
                if not result.exhausted:
                    left.append(work.due)
        self._write_errors(complaints)
        # Look again, because a full last batch may have taken the last row that was due.
        if any(rows.exists() for rows in left):
            stop.end_command("More is due.")
            if self.verbosity:
                self.write(f"Stopped by --max-batches {self.max_batches}. More is due.")
            sys.exit(EXIT_WORK_LEFT)
        if complaints:
            sys.exit(self.exit_code)

    def _run_again_and_again(self, pause: float) -> None:
        reported: set[str] = set()
        with Stop() as stop:
            while stop.signum is None:
                try:
                    for work in self.works():
                        result = self.take(work, stop)
                        if self.verbosity and (result.touched or self.verbosity > 1):
                            self.write(work.describe(result))
                        complaints = self.complaints(result)
                        if complaints.keys() != reported:  # write news only, so that they don't fill the log
                            self._write_errors(complaints)
                            reported = set(complaints)
                except DatabaseError as error:
                    self.stderr.write(refusal(self.using, error))
                    connections[self.using].close()  # the connection itself may be broken
                stop.sleep(pause)

    def take(self, work: Work[_Result], stop: Stop) -> _Result:
        """Take batches until nothing more is due, ``--max-batches`` are taken, or a signal comes."""
        with self._reporting(work) as report:
            total, taken = next(work.batches), 1
            report(total.touched, work.describe(total))
            while not total.exhausted and taken != self.max_batches and stop.sleep(self.pause):
                total, taken = total + next(work.batches), taken + 1
                report(total.touched, work.describe(total))
        return total

    def _reporting(self, work: Work[_Result]) -> AbstractContextManager[Report]:
        """Show the progress of the block: a bar on a terminal if rich is installed, plain lines otherwise."""
        # The bar is written to standard error, so that standard output can be redirected to a file.
        stream: TextIO = self.options.get("stderr") or sys.stderr
        if self.verbosity and stream.isatty() and find_spec("rich"):
            return _bar(stream, work.label, work.due.count())
        last = time.monotonic()

        def report(done: int, line: str) -> None:
            nonlocal last
            if self.verbosity > 1 or (self.verbosity and time.monotonic() - last >= REPORT_EVERY):
                last = time.monotonic()
                self.write(f"So far: {line}")

        return nullcontext(report)

    def _write_errors(self, complaints: Mapping[str, str]) -> None:
        for complaint in complaints.values():
            self.stderr.write(complaint)


@contextmanager
def _bar(stream: TextIO, label: str, total: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=total)
        # During the run more rows may become due than were counted before it.
        yield lambda done, line: bar.update(task, completed=done, total=max(total, done))
