"""What the commands share that have ``--watch``: a run over all that is due, once, or again and again."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, connections

from .progress import Report
from .running import EXIT_USAGE, MAX_PAUSE, BatchCommand, Stop, refusal, stop_between_batches


class BatchResult(Protocol):
    """What a batch came to, as counts. The sum of those of a run is what the run came to."""

    exhausted: bool

    @property
    def touched(self) -> int: ...

    def __add__(self: _Result, later: _Result) -> _Result: ...  # noqa: PYI019 - Self is of Python 3.11


_Result = TypeVar("_Result", bound=BatchResult)


def add_watch(parser: CommandParser, verb: str, default: float) -> None:
    """``verb`` is what it then does again and again, ``default`` a pause in seconds."""
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=default,
        metavar="SECONDS",
        help=f"{verb} again and again, with this pause between (default: %(const)g)",
    )


def check_watch(watch: float | None, *, dry_run: bool) -> None:
    if watch is not None and not 0 < watch <= MAX_PAUSE:
        raise CommandError(f"--watch must be above 0 and up to {MAX_PAUSE:.0f} seconds.", returncode=EXIT_USAGE)
    if watch is not None and dry_run:
        raise CommandError("--watch and --dry-run exclude each other.", returncode=EXIT_USAGE)


class Run(ABC, Generic[_Result]):
    """A command's run over all that is due. What it does, and what it says of that, its subclass tells."""

    #: Of a run in which something was not right.
    exit_code: ClassVar[int]

    def __init__(
        self, command: BatchCommand, using: str, batch_size: int, max_batches: int | None, options: Mapping[str, Any]
    ) -> None:
        self.command = command
        self.using = using
        self.batch_size = batch_size
        self.max_batches = max_batches
        self.options = options
        self.verbosity: int = options["verbosity"]

    @abstractmethod
    def nothing(self) -> _Result:
        """What a run came to that has taken no batch."""

    @abstractmethod
    def batches(self) -> Iterator[_Result]:
        """Take batch after batch until nothing more is due."""

    @abstractmethod
    def progress(self) -> AbstractContextManager[Report]:
        """How it shows how far it has come."""

    @abstractmethod
    def described(self, result: _Result) -> str:
        """What a run came to, as a sentence."""

    @abstractmethod
    def described_so_far(self, result: _Result) -> str:
        """The same of a run that goes on."""

    @abstractmethod
    def complaints(self, result: _Result) -> Mapping[Hashable, str]:
        """What was not right, as sentences, each under what makes it another one than that of the run before."""

    def once(self) -> None:
        with stop_between_batches() as stop:
            result = self.take(stop)
        if self.verbosity:
            self.command.write(self.described(result))
        complaints = self.complaints(result)
        self._complain(complaints)
        if not result.exhausted:
            self.command.end_with_work_left(stop, self.max_batches, "More may be due.", verbosity=self.verbosity)
        if complaints:
            sys.exit(self.exit_code)

    def watch(self, pause: float) -> None:
        known: set[Hashable] = set()
        with stop_between_batches() as stop:
            while stop.signum is None:
                try:
                    result = self.take(stop)
                except DatabaseError as error:
                    self.command.stderr.write(refusal(self.using, error))
                    connections[self.using].close()  # it may be the connection that is broken
                else:
                    if self.verbosity and (result.touched or self.verbosity > 1):
                        self.command.write(self.described(result))
                    complaints = self.complaints(result)
                    if complaints.keys() != known:  # news only, or a log would hold nothing else
                        self._complain(complaints)
                        known = set(complaints)
                stop.sleep(pause)

    def take(self, stop: Stop) -> _Result:
        """Take batches until nothing more is due, ``--max-batches`` are taken, or a signal comes."""
        total = self.nothing()
        with self.progress() as report:
            for number, batch in enumerate(self.batches(), start=1):
                total += batch
                report(total.touched, self.described_so_far(total))
                if number == self.max_batches or stop.signum is not None:
                    break
        return total

    def _complain(self, complaints: Mapping[Hashable, str]) -> None:
        for complaint in complaints.values():
            self.command.stderr.write(complaint)
