"""Shared by the commands: exit codes, stopping on a signal, and the class ``BatchCommand``."""

from __future__ import annotations

import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Generic, Self, TypeVar

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections

from ..operate.batches import BatchResult
from ..operate.statistics import Number, undeclared
from ..store import records_database
from ..views.checks import declared_operations

_Result = TypeVar("_Result", bound=BatchResult)

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_ROWS_LEFT = 3
EXIT_UNKNOWN_OPERATIONS = 4
EXIT_SIGNAL = 128  # plus the signal's number, as shells do

#: The end of a command's help.
EXIT_CODES = "Exit codes: 0 done, 1 the database refused, 2 invalid argument"

# Python resumes a sleep after handling a signal, so a pause is slept in slices.
SLICE = 0.2  # seconds

MAX_PAUSE = 3600.0  # seconds

#: A long run reports this often, so that its log shows that it is alive.
REPORT_EVERY = 10.0  # seconds


class Stop(ExitStack):
    """Within its block, record the first SIGINT or SIGTERM, so that the command ends between two batches.

    A second signal has its usual effect.
    """

    signum: int | None = None

    def __enter__(self) -> Self:
        # Only the main thread can install signal handlers.
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                previous = signal.signal(signum, self._note)  # None if it was not installed from Python
                self.callback(signal.signal, signum, previous or signal.SIG_DFL)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.close()  # restores the handlers

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a signal arrives."""
        end = time.monotonic() + seconds
        while self.signum is None and (left := end - time.monotonic()) > 0:
            # Not an Event: the signal handler may interrupt Event.wait() while it holds the lock.
            time.sleep(min(left, SLICE))  # a signal ends this wait, within one slice at the latest

    def end_command(self, left: str) -> None:
        """End the command if a signal has arrived. ``left`` is a sentence about the remaining work."""
        if self.signum is not None:
            name = signal.Signals(self.signum).name
            raise CommandError(f"Stopped by {name}. {left}", returncode=EXIT_SIGNAL + self.signum)


def counted(count: int, name: str) -> str:
    return f"1 {name}" if count == 1 else f"{count:,} {name}s"


def require(is_right: bool, message: str) -> None:
    """End the command if an argument is invalid. Needed because ``call_command()`` does not parse its values."""
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
    """End the command if the database refuses. ``consequence`` is a sentence about the command's work."""
    try:
        yield
    except DatabaseError as error:
        raise CommandError(f"{refusal(using, error)}\n{consequence}".strip(), returncode=EXIT_REFUSED) from error


def count_undeclared(using: str) -> Number:
    """``operate.statistics.undeclared``, after importing every module with declarations."""
    declared_operations()
    return undeclared(using)


def lines_about_undeclared(number: Number) -> list[str]:
    return [
        f"No code declares operation {operation!r}, which has {count:,} of the newest records."
        for operation, count in (number.by_operation or {}).items()
    ]


@dataclass
class Work(Generic[_Result]):
    """The rows of one kind that a run processes."""

    batches: Iterator[_Result]
    #: Describes a result in a sentence.
    describe: Callable[[_Result], str]


class BatchCommand(BaseCommand, ABC, Generic[_Result]):
    """Takes bounded batches until nothing more is due, repeatedly with ``--watch``.

    A signal stops it between batches.
    """

    #: For the help: what a batch contains, and its default and largest size.
    batch_of: ClassVar[str]
    default_batch: ClassVar[int]
    largest_batch: ClassVar[int]
    #: The default pause of ``--watch`` in seconds; None if the command has no ``--watch``.
    default_watch: ClassVar[float | None] = None
    #: The consequence of a refusal by the database, as a sentence.
    refused: ClassVar[str] = "Earlier batches stay done."
    #: The exit code of a run with complaints.
    exit_code: ClassVar[int] = EXIT_REFUSED

    using: str

    def default_database(self) -> str:
        """The default of ``--database``."""
        return records_database()

    @abstractmethod
    def works(self) -> Iterator[Work[_Result]]:
        """The work of a run, one for each kind of row."""

    @abstractmethod
    def count(self) -> None:
        """Carry out ``--dry-run``: count without changing anything."""

    def complaints(self, result: _Result) -> Mapping[str, str]:
        """Faults found by a run: sentences, by key. With ``--watch``, they are written only when the keys change."""
        return {}

    def add_arguments(self, parser: CommandParser) -> None:
        add_batch_size(parser, self.batch_of, self.default_batch, self.largest_batch)
        parser.add_argument("--dry-run", action="store_true", help="report how many rows are due, and change nothing")
        if self.default_watch is not None:
            watch = "run repeatedly, with this pause between; SIGINT or SIGTERM ends it (default: %(const)g)"
            parser.add_argument(
                "--watch", type=float, nargs="?", const=self.default_watch, metavar="SECONDS", help=watch
            )
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that the rows are written to")

    def write(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

    def handle(self, *args: object, **options: Any) -> None:
        watch, dry_run = options.get("watch"), options["dry_run"]
        self.verbosity: int = options["verbosity"]
        self.batch_size: int = options["batch_size"]
        check_batch_size(self.batch_size, self.largest_batch)
        in_range = watch is None or 0 < watch <= MAX_PAUSE
        require(in_range, f"--watch must be above 0 and up to {MAX_PAUSE:.0f} seconds.")
        require(watch is None or not dry_run, "--watch and --dry-run exclude each other.")
        self.using = self.default_database() if options["database"] is None else options["database"]
        check_database(self.using)
        with refusals_as_errors(self.using, self.refused):
            if dry_run:
                self.count()
            elif watch is None:
                self._run_once()
            else:
                self._run_repeatedly(watch)

    def _run_once(self) -> None:
        complaints: dict[str, str] = {}
        with Stop() as stop:
            for work in self.works():
                result = self.take(work, stop)
                complaints |= self.complaints(result)
                if self.verbosity:
                    self.write(work.describe(result))
                if stop.signum is not None:
                    break
        self._write_errors(complaints)
        stop.end_command("More may be due.")
        if complaints:
            sys.exit(self.exit_code)

    def _run_repeatedly(self, pause: float) -> None:
        reported: set[str] = set()
        with Stop() as stop:
            while stop.signum is None:
                try:
                    for work in self.works():
                        result = self.take(work, stop)
                        if self.verbosity and (result.touched or self.verbosity > 1):
                            self.write(work.describe(result))
                        complaints = self.complaints(result)
                        if complaints.keys() != reported:  # don't fill the log with repetitions
                            self._write_errors(complaints)
                            reported = set(complaints)
                except DatabaseError as error:
                    self.stderr.write(refusal(self.using, error))
                    connections[self.using].close()  # it may be broken
                stop.sleep(pause)

    def take(self, work: Work[_Result], stop: Stop) -> _Result:
        """Take batches until nothing more is due or a signal arrives."""
        reported = time.monotonic()
        total = next(work.batches)
        while not total.exhausted and stop.signum is None:
            if self.verbosity > 1 or (self.verbosity and time.monotonic() - reported >= REPORT_EVERY):
                reported = time.monotonic()
                self.write(f"So far: {work.describe(total)}")
            total += next(work.batches)
        return total

    def _write_errors(self, complaints: Mapping[str, str]) -> None:
        for complaint in complaints.values():
            self.stderr.write(complaint)
