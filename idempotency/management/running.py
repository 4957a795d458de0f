"""What the commands share: exit codes, how a signal ends one that runs for long, and ``BatchCommand``."""

from __future__ import annotations

import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import DatabaseError, connections

from ..upkeep.batches import BatchResult
from .progress import REPORT_EVERY, progress

_Result = TypeVar("_Result", bound=BatchResult)

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_WORK_LEFT = 3
EXIT_UNKNOWN_OPERATIONS = 4
EXIT_SIGNAL = 128  # plus the signal's number, as shells do

# A signal that is handled doesn't end a sleep, so a pause is slept in slices of this.
SLICE = 0.2  # seconds

MAX_PAUSE = 3600.0  # seconds


class HelpFormatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the epilog."""


class Stop:
    """Notes the first SIGINT or SIGTERM instead of dying of it. A second one has its usual effect."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.restore()

    def restore(self) -> None:
        while self._previous:
            signum, handler = self._previous.popitem()
            signal.signal(signum, handler or signal.SIG_DFL)  # None: it was not installed from Python

    def sleep(self, seconds: float) -> bool:
        """Sleep, unless a signal came or comes. Whether to go on."""
        end = time.monotonic() + seconds
        while self.signum is None and (left := end - time.monotonic()) > 0:
            # In slices and not on an Event: Python resumes a sleep after a signal was handled, and a handler that sets
            # an Event can meet its lock held by the very wait that it interrupts.
            time.sleep(min(left, SLICE))  # the pause that the caller asked for
        return self.signum is None


@contextmanager
def stop_between_batches() -> Iterator[Stop]:
    stop = Stop()
    # Python lets no other thread than the main one handle signals. There the process's own handling remains.
    if threading.current_thread() is threading.main_thread():
        stop.listen()
    try:
        yield stop
    finally:
        stop.restore()


def add_batch_size(parser: CommandParser, of_what: str, default: int, largest: int) -> None:
    text = f"{of_what}, up to {largest} (default: %(default)s)"
    parser.add_argument("--batch-size", type=int, default=default, metavar="N", help=text)


def check_batch_size(batch_size: int, largest: int) -> None:
    if not 1 <= batch_size <= largest:
        raise CommandError(f"--batch-size must be between 1 and {largest}.", returncode=EXIT_USAGE)


def check_database(using: str) -> None:
    if using not in connections:
        raise CommandError(f"--database: there is no database {using!r} in DATABASES.", returncode=EXIT_USAGE)


def refusal(using: str, error: DatabaseError) -> str:
    return f"Database {using!r} refused: {str(error).strip()}"


@contextmanager
def refusals_as_errors(using: str, consequence: str = "") -> Iterator[None]:
    """End the command if the database refuses, and say what that means for its work."""
    try:
        yield
    except DatabaseError as error:
        message = "\n".join(filter(None, (refusal(using, error), consequence)))
        raise CommandError(message, returncode=EXIT_REFUSED) from error


@dataclass
class Work(Generic[_Result]):
    """What a run works off, batch after batch."""

    #: Labels the bar.
    label: str
    batches: Iterator[_Result]
    #: How many rows are due, for the bar.
    count_due: Callable[[], int]
    #: What the batches so far came to, as a sentence.
    describe_so_far: Callable[[_Result], str]


class StoppableCommand(BaseCommand):
    """Does bounded pieces of work, between any two of which a signal stops it."""

    #: Ends the help: what the exit codes mean.
    epilog: ClassVar[str]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs = {"epilog": self.epilog, "formatter_class": HelpFormatter, **kwargs}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def write(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

    def end_with_work_left(self, stop: Stop, max_batches: int | None, left: str, *, verbosity: int) -> NoReturn:
        """Say what has stopped it before it was done: a signal, or else ``--max-batches``."""
        if stop.signum is not None:
            name = signal.Signals(stop.signum).name
            raise CommandError(f"Stopped by {name}. {left}", returncode=EXIT_SIGNAL + stop.signum)
        if verbosity:
            self.write(f"Stopped by --max-batches {max_batches}. {left}")
        sys.exit(EXIT_WORK_LEFT)


class BatchCommand(StoppableCommand, ABC, Generic[_Result]):
    """Takes bounded batches until nothing more is due: once, or again and again with ``--watch``.

    Between any two batches a signal stops it. What a batch does, and what is said of it, its subclass tells.
    """

    #: What a batch is made of, how large it is and may be, and what the other options do: for the help.
    batch_of: ClassVar[str]
    default_batch: ClassVar[int]
    largest_batch: ClassVar[int]
    max_batches_help: ClassVar[str]
    dry_run_help: ClassVar[str]
    #: What is done again and again, and the pause between in seconds; None if the command has no ``--watch``.
    watch_verb: ClassVar[str] = ""
    default_watch: ClassVar[float | None] = None
    #: Whether the bar stays on the terminal. With ``--watch`` one would stay after the other.
    leaves_bar: ClassVar[bool] = False
    #: What a refusal of the database means for the work.
    refused: ClassVar[str]
    #: What ``--max-batches`` or a signal leaves.
    left: ClassVar[str] = "More may be due."
    #: The exit code of a run in which something was not right.
    exit_code: ClassVar[int] = EXIT_REFUSED

    using: str
    batch_size: int
    max_batches: int | None
    #: Seconds between two batches.
    pause: float = 0.0
    options: Mapping[str, Any]
    verbosity: int

    @abstractmethod
    def default_database(self) -> str:
        """The alias of the database that is worked on unless ``--database`` names another one."""

    @abstractmethod
    def work(self) -> Work[_Result]:
        """What a run has to do."""

    @abstractmethod
    def describe(self, result: _Result) -> str:
        """What a run came to, as a sentence."""

    @abstractmethod
    def count(self) -> None:
        """Do what ``--dry-run`` asks for."""

    def take_options(self, options: Mapping[str, Any]) -> None:
        """Check the options that only this command has, and keep them."""

    def complaints(self, result: _Result) -> Mapping[Hashable, str]:
        """What was not right, as sentences. Each has a key, by which it is told from those of the run before."""
        return {}

    def add_arguments(self, parser: CommandParser) -> None:
        add_batch_size(parser, self.batch_of, self.default_batch, self.largest_batch)
        parser.add_argument("--max-batches", type=int, metavar="N", help=self.max_batches_help)
        parser.add_argument("--dry-run", action="store_true", help=self.dry_run_help)
        if self.default_watch is not None:
            watch = f"{self.watch_verb} again and again, with this pause between (default: %(const)g)"
            parser.add_argument(
                "--watch", type=float, nargs="?", const=self.default_watch, metavar="SECONDS", help=watch
            )
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that the rows are written to")

    def handle(
        self,
        *args: object,
        batch_size: int,
        max_batches: int | None,
        dry_run: bool,
        database: str | None,
        watch: float | None = None,
        **options: Any,
    ) -> None:
        # call_command() hands values over without parsing them, so they are checked here for both ways in.
        check_batch_size(batch_size, self.largest_batch)
        if max_batches is not None and max_batches < 1:
            raise CommandError("--max-batches must be 1 or more.", returncode=EXIT_USAGE)
        if watch is not None and not 0 < watch <= MAX_PAUSE:
            raise CommandError(f"--watch must be above 0 and up to {MAX_PAUSE:.0f} seconds.", returncode=EXIT_USAGE)
        if watch is not None and dry_run:
            raise CommandError("--watch and --dry-run exclude each other.", returncode=EXIT_USAGE)
        self.take_options(options)
        self.using = self.default_database() if database is None else database
        check_database(self.using)
        self.batch_size, self.max_batches = batch_size, max_batches
        self.options, self.verbosity = options, options["verbosity"]
        with refusals_as_errors(self.using, self.refused):
            if dry_run:
                self.count()
            elif watch is None:
                self.run_once()
            else:
                self.run_again_and_again(watch)

    def run_once(self) -> None:
        with stop_between_batches() as stop:
            result = self.take(self.work(), stop)
        if self.verbosity:
            self.write(self.describe(result))
        complaints = self.complaints(result)
        self._complain(complaints)
        if not result.exhausted:
            self.end_with_work_left(stop, self.max_batches, self.left, verbosity=self.verbosity)
        if complaints:
            sys.exit(self.exit_code)

    def run_again_and_again(self, pause: float) -> None:
        known: set[Hashable] = set()
        with stop_between_batches() as stop:
            while stop.signum is None:
                try:
                    result = self.take(self.work(), stop)
                except DatabaseError as error:
                    self.stderr.write(refusal(self.using, error))
                    connections[self.using].close()  # it may be the connection that is broken
                else:
                    if self.verbosity and (result.touched or self.verbosity > 1):
                        self.write(self.describe(result))
                    complaints = self.complaints(result)
                    if complaints.keys() != known:  # news only, or a log would hold nothing else
                        self._complain(complaints)
                        known = set(complaints)
                stop.sleep(pause)

    def take(self, work: Work[_Result], stop: Stop) -> _Result:
        """Take batches until nothing more is due, ``--max-batches`` are taken, or a signal comes."""
        reporting = progress(
            work.label, work.count_due, self.write, self.options, every=REPORT_EVERY, leaves_bar=self.leaves_bar
        )
        with reporting as report:
            total, taken = next(work.batches), 1
            report(total.touched, work.describe_so_far(total))
            while not total.exhausted and taken != self.max_batches and stop.sleep(self.pause):
                total, taken = total + next(work.batches), taken + 1
                report(total.touched, work.describe_so_far(total))
        return total

    def _complain(self, complaints: Mapping[Hashable, str]) -> None:
        for complaint in complaints.values():
            self.stderr.write(complaint)
