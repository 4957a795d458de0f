"""``manage.py recover_idempotency``: parse arguments, recover batch after batch, report."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections

from idempotency.claims import alias
from idempotency.counters import counters
from idempotency.management.running import (
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_UNKNOWN_OPERATIONS,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    HelpFormatter,
    Stop,
    stop_between_batches,
)
from idempotency.operation import registry
from idempotency.recovery import (
    DEFAULT_BATCH_SIZE,
    MAX_BATCH_SIZE,
    MAX_LISTED,
    RecoveryResult,
    abandoned,
    recover_batches,
)

EPILOG = f"""exit codes:
  0    every abandoned claim of a known operation is settled, or will be asked for again
  {EXIT_REFUSED}    the database refused; what was settled before stays settled
  {EXIT_USAGE}    an argument is wrong, nothing was done
  {EXIT_WORK_LEFT}    stopped by --max-batches, and more is due
  {EXIT_UNKNOWN_OPERATIONS}    claims are left of operations that are not declared in this process
  {EXIT_SIGNAL + signal.SIGINT}  interrupted, {EXIT_SIGNAL + signal.SIGTERM} terminated: after the batch in hand

With --watch it sweeps until it is told to stop, which is then its success: the exit code is 0. A database that
refuses is reported, and asked again at the next sweep.
"""

DEFAULT_WATCH = 10.0  # seconds: with the lease, how long a claim stays abandoned at most
MAX_WATCH = 3600.0  # seconds

# Where nobody watches, a line now and then shows in the log that a long sweep is alive.
REPORT_EVERY = 10.0  # seconds

_Report = Callable[[RecoveryResult], None]


class Command(BaseCommand):
    help = (
        "Settle claims whose lease is over, as their operations declare: run again, asked for, or parked.\n"
        "May run at any time, and more than once at a time; a killed run is simply run again."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs = {"epilog": EPILOG, "formatter_class": HelpFormatter, **kwargs}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--batch-size",
            type=int,
            default=DEFAULT_BATCH_SIZE,
            metavar="N",
            help=f"claims to settle between two looks for a signal, up to {MAX_BATCH_SIZE} (default: %(default)s)",
        )
        parser.add_argument("--max-batches", type=int, metavar="N", help="end a sweep after N batches (default: none)")
        parser.add_argument("--dry-run", action="store_true", help="count what is abandoned, settle nothing")
        parser.add_argument(
            "--watch",
            type=float,
            nargs="?",
            const=DEFAULT_WATCH,
            metavar="SECONDS",
            help="sweep again and again, with this pause between (default: %(const)g)",
        )
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(
        self,
        *args: object,
        batch_size: int,
        max_batches: int | None,
        dry_run: bool,
        watch: float | None,
        database: str | None,
        **options: Any,
    ) -> None:
        # call_command() hands values over without parsing them, so they are checked here for both ways in.
        if not 1 <= batch_size <= MAX_BATCH_SIZE:
            raise CommandError(f"--batch-size must be between 1 and {MAX_BATCH_SIZE}.", returncode=EXIT_USAGE)
        if max_batches is not None and max_batches < 1:
            raise CommandError("--max-batches must be 1 or more.", returncode=EXIT_USAGE)
        if watch is not None and not 0 < watch <= MAX_WATCH:
            raise CommandError(f"--watch must be above 0 and up to {MAX_WATCH:.0f} seconds.", returncode=EXIT_USAGE)
        if watch is not None and dry_run:
            raise CommandError("--watch and --dry-run exclude each other.", returncode=EXIT_USAGE)
        using = alias() if database is None else database
        if using not in connections:
            raise CommandError(f"--database: there is no database {using!r} in DATABASES.", returncode=EXIT_USAGE)
        sweep = _Sweep(self, using, batch_size, max_batches, options)
        try:
            if dry_run:
                self._count(using)
            elif watch is None:
                sweep.run_once()
            else:
                sweep.watch(watch)
        except DatabaseError as error:
            message = f"{_refusal(using, error)}\nWhat was settled before stays settled."
            raise CommandError(message, returncode=EXIT_REFUSED) from error

    def _count(self, using: str) -> None:
        found = Counter(abandoned(using).values_list("operation", flat=True)[:MAX_LISTED])
        total = sum(found.values())
        self.stdout.write(f"{'At least ' if total == MAX_LISTED else ''}{_claims(total)} abandoned.")
        for name, count in sorted(found.items()):
            operation = registry.get(name)
            fate = "left alone, not declared here" if operation is None else operation.recovery.value
            self.stdout.write(f"  {name}: {count:,} ({fate})")


class _Sweep:
    def __init__(
        self, command: Command, using: str, batch_size: int, max_batches: int | None, options: dict[str, Any]
    ) -> None:
        self.command = command
        self.using = using
        self.batch_size = batch_size
        self.max_batches = max_batches
        self.options = options
        self.verbosity: int = options["verbosity"]

    def run_once(self) -> None:
        with stop_between_batches() as stop:
            result = self._sweep(stop)
        if self.verbosity:
            self._write(f"Settled {_described(result)}.")
        self._report_unknown(result)
        if not result.exhausted:
            if stop.signum is not None:
                name = signal.Signals(stop.signum).name
                raise CommandError(f"Stopped by {name}. More may be due.", returncode=EXIT_SIGNAL + stop.signum)
            if self.verbosity:
                self._write(f"Stopped by --max-batches {self.max_batches}. More may be due.")
            sys.exit(EXIT_WORK_LEFT)
        if result.unknown_operations:
            sys.exit(EXIT_UNKNOWN_OPERATIONS)

    def watch(self, pause: float) -> None:
        reported: Counter[str] = Counter()
        with stop_between_batches() as stop:
            while stop.signum is None:
                try:
                    result = self._sweep(stop)
                except DatabaseError as error:
                    self.command.stderr.write(_refusal(self.using, error))
                    connections[self.using].close()  # it may be the connection that is broken
                else:
                    if self.verbosity and (result.touched or self.verbosity > 1):
                        self._write(f"Settled {_described(result)}.")
                    if result.unknown_operations != reported:  # news only, or a log would hold nothing else
                        reported = result.unknown_operations
                        self._report_unknown(result)
                stop.sleep(pause)

    def _sweep(self, stop: Stop) -> RecoveryResult:
        total = RecoveryResult()
        with self._reporter() as report:
            batches = recover_batches(batch_size=self.batch_size, using=self.using)
            for number, batch in enumerate(batches, start=1):
                total += batch
                report(total)
                if number == self.max_batches or stop.signum is not None:
                    break
        counters.flush()
        return total

    def _reporter(self) -> AbstractContextManager[_Report]:
        """Progress as a bar on a terminal, if rich is installed, and as plain lines elsewhere."""
        # The bar goes where errors go, so that the output can be kept in a file while somebody watches.
        stream: TextIO = self.options.get("stderr") or sys.stderr
        if self.verbosity and stream.isatty():
            try:
                import rich  # noqa: F401
            except ImportError:
                pass
            else:
                return _bar(stream, abandoned(self.using).order_by()[:MAX_LISTED].count())
        return self._lines()

    @contextmanager
    def _lines(self) -> Iterator[_Report]:
        last = time.monotonic()

        def report(total: RecoveryResult) -> None:
            nonlocal last
            if self.verbosity > 1 or (self.verbosity and time.monotonic() - last >= REPORT_EVERY):
                last = time.monotonic()
                self._write(f"Settled {_described(total)} so far.")

        yield report

    def _report_unknown(self, result: RecoveryResult) -> None:
        for name, count in sorted(result.unknown_operations.items()):
            self.command.stderr.write(
                f"Left alone: {_claims(count)} of operation {name!r}, which is not declared in this process. "
                f"Declare it in an app's operations.py."
            )

    def _write(self, line: str) -> None:
        self.command.stdout.write(line)
        self.command.stdout.flush()


@contextmanager
def _bar(stream: TextIO, total: int) -> Iterator[_Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Recovering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Gone when the sweep is over: --watch would leave one bar after the other.
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("", total=total)
        # More can be abandoned during a sweep than were counted before it.
        yield lambda result: progress.update(task, completed=result.touched, total=max(total, result.touched))


def _refusal(using: str, error: DatabaseError) -> str:
    return f"Database {using!r} refused: {str(error).strip()}"


def _described(result: RecoveryResult) -> str:
    counts = f"{result.recoverable:,} recoverable, {result.completed:,} completed, {result.parked:,} parked"
    postponed = f", {result.postponed:,} to be asked for again" if result.postponed else ""
    return f"{_claims(result.touched)}: {counts}{postponed}"


def _claims(count: int) -> str:
    return "1 claim" if count == 1 else f"{count:,} claims"
