"""What the commands share: exit codes, the options that several have, and how a signal ends one that runs for long."""

from __future__ import annotations

import signal
import sys
import threading
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import DatabaseError, connections

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


class BatchCommand(BaseCommand):
    """Takes one bounded batch after the other, between any two of which it may be stopped."""

    #: Ends the help: what the exit codes mean.
    epilog: str

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


def add_batch_size(parser: CommandParser, of_what: str, default: int, largest: int) -> None:
    parser.add_argument(
        "--batch-size",
        type=int,
        default=default,
        metavar="N",
        help=f"{of_what}, up to {largest} (default: %(default)s)",
    )


# call_command() hands values over without parsing them, so they are checked by these for both ways in.


def check_batches(batch_size: int, max_batches: int | None, *, largest: int) -> None:
    if not 1 <= batch_size <= largest:
        raise CommandError(f"--batch-size must be between 1 and {largest}.", returncode=EXIT_USAGE)
    if max_batches is not None and max_batches < 1:
        raise CommandError("--max-batches must be 1 or more.", returncode=EXIT_USAGE)


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
