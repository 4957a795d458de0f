"""``manage.py relay_outbox``: parse arguments, send batch after batch, report."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections

from idempotency.management.running import (
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    HelpFormatter,
    Stop,
    stop_between_batches,
)
from idempotency.messages import MAX_COUNTED, backlog
from idempotency.outbox import alias
from idempotency.relay import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, RelayResult, due, relay_batches

EXIT_UNREACHABLE = 5

EPILOG = f"""exit codes:
  0    everything that was due is sent, or will be tried again, or is dead
  {EXIT_REFUSED}    the database refused; what was sent and is not marked will be sent again
  {EXIT_USAGE}    an argument is wrong, nothing was done
  {EXIT_WORK_LEFT}    stopped by --max-batches, and more is due
  {EXIT_UNREACHABLE}    a broker can't be reached
  {EXIT_SIGNAL + signal.SIGINT}  interrupted, {EXIT_SIGNAL + signal.SIGTERM} terminated: after the batch in hand

With --watch it goes on until it is told to stop, which is then its success: the exit code is 0. A database that
refuses and a broker that can't be reached are reported, and asked again.
"""

DEFAULT_WATCH = 1.0  # seconds: how long a message waits at most that nobody was nudged for
MAX_WATCH = 3600.0  # seconds

# Where nobody watches, a line now and then shows in the log that a long run is alive.
REPORT_EVERY = 10.0  # seconds

_Report = Callable[[RelayResult], None]


class Command(BaseCommand):
    help = (
        "Send the messages of the outbox that are due.\n"
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
            help=f"messages to send between two looks for a signal, up to {MAX_BATCH_SIZE} (default: %(default)s)",
        )
        parser.add_argument("--max-batches", type=int, metavar="N", help="end a run after N batches (default: none)")
        parser.add_argument("--dry-run", action="store_true", help="count what waits, send nothing")
        parser.add_argument(
            "--watch",
            type=float,
            nargs="?",
            const=DEFAULT_WATCH,
            metavar="SECONDS",
            help="run again and again, with this pause between (default: %(const)g)",
        )
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that messages are written to")

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
        run = _Run(self, using, batch_size, max_batches, options)
        try:
            if dry_run:
                self._count(using)
            elif watch is None:
                run.once()
            else:
                run.watch(watch)
        except DatabaseError as error:
            message = f"{_refusal(using, error)}\nWhat was sent and is not marked will be sent again."
            raise CommandError(message, returncode=EXIT_REFUSED) from error

    def _count(self, using: str) -> None:
        found = backlog(using=using)
        ready = due(using)[:MAX_COUNTED].count()
        self.stdout.write(f"{_messages(found.pending)} pending, of which {ready:,} can be sent now.")
        if found.oldest_due is not None:
            self.stdout.write(f"Due for {found.oldest_due.total_seconds():,.0f} s at most.")
        self.stdout.write(f"{_messages(found.dead)} dead.")


class _Run:
    def __init__(
        self, command: Command, using: str, batch_size: int, max_batches: int | None, options: dict[str, Any]
    ) -> None:
        self.command = command
        self.using = using
        self.batch_size = batch_size
        self.max_batches = max_batches
        self.options = options
        self.verbosity: int = options["verbosity"]

    def once(self) -> None:
        with stop_between_batches() as stop:
            result = self._send(stop)
        if self.verbosity:
            self._write(_described(result))
        self._report_unavailable(result)
        if not result.exhausted:
            if stop.signum is not None:
                name = signal.Signals(stop.signum).name
                raise CommandError(f"Stopped by {name}. More may be due.", returncode=EXIT_SIGNAL + stop.signum)
            if self.verbosity:
                self._write(f"Stopped by --max-batches {self.max_batches}. More may be due.")
            sys.exit(EXIT_WORK_LEFT)
        if result.unavailable:
            sys.exit(EXIT_UNREACHABLE)

    def watch(self, pause: float) -> None:
        reported: set[str] = set()
        with stop_between_batches() as stop:
            while stop.signum is None:
                try:
                    result = self._send(stop)
                except DatabaseError as error:
                    self.command.stderr.write(_refusal(self.using, error))
                    connections[self.using].close()  # it may be the connection that is broken
                else:
                    if self.verbosity and (result.touched or self.verbosity > 1):
                        self._write(_described(result))
                    if result.unavailable.keys() != reported:  # news only, or a log would hold nothing else
                        self._report_unavailable(result)
                        reported = set(result.unavailable)
                stop.sleep(pause)

    def _send(self, stop: Stop) -> RelayResult:
        total = RelayResult()
        with self._reporter() as report:
            batches = relay_batches(batch_size=self.batch_size, using=self.using)
            for number, batch in enumerate(batches, start=1):
                total += batch
                report(total)
                if number == self.max_batches or stop.signum is not None:
                    break
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
                return _bar(stream, due(self.using)[:MAX_COUNTED].count())
        return self._lines()

    @contextmanager
    def _lines(self) -> Iterator[_Report]:
        last = time.monotonic()

        def report(total: RelayResult) -> None:
            nonlocal last
            if self.verbosity > 1 or (self.verbosity and time.monotonic() - last >= REPORT_EVERY):
                last = time.monotonic()
                self._write(f"So far: {_described(total)}")

        yield report

    def _report_unavailable(self, result: RelayResult) -> None:
        for sender, error in sorted(result.unavailable.items()):
            self.command.stderr.write(f"Sender {sender} can't reach its broker: {error}")

    def _write(self, line: str) -> None:
        self.command.stdout.write(line)
        self.command.stdout.flush()


@contextmanager
def _bar(stream: TextIO, total: int) -> Iterator[_Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Sending"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Gone when the run is over: --watch would leave one bar after the other.
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("", total=total)
        # More can fall due during a run than were counted before it.
        yield lambda result: progress.update(task, completed=result.touched, total=max(total, result.touched))


def _refusal(using: str, error: DatabaseError) -> str:
    return f"Database {using!r} refused: {str(error).strip()}"


def _described(result: RelayResult) -> str:
    parts = [f"Sent {_messages(result.sent)}"]
    for count, fate in ((result.postponed, "to be tried again"), (result.put_back, "not tried"), (result.dead, "dead")):
        if count:
            parts.append(f"{count:,} {fate}")
    return f"{', '.join(parts)}."


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"
