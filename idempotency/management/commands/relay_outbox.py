"""``manage.py relay_outbox``: parse arguments, send batch after batch, report."""

from __future__ import annotations

import signal
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from django.core.management.base import CommandParser

from ...outbox import alias
from ...outbox.backlog import MAX_COUNTED, backlog
from ...outbox.relay import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, RelayResult, due, relay_batches
from ..progress import REPORT_EVERY, Report, progress
from ..running import (
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    BatchCommand,
    add_batch_size,
    check_batches,
    check_database,
    refusals_as_errors,
)
from ..watching import Run, add_watch, check_watch

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


class Command(BatchCommand):
    help = (
        "Send the messages of the outbox that are due.\n"
        "May run at any time, and more than once at a time; a killed run is simply run again."
    )
    epilog = EPILOG

    def add_arguments(self, parser: CommandParser) -> None:
        add_batch_size(parser, "messages to send between two looks for a signal", DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE)
        parser.add_argument("--max-batches", type=int, metavar="N", help="end a run after N batches (default: none)")
        parser.add_argument("--dry-run", action="store_true", help="count what waits, send nothing")
        add_watch(parser, "run", DEFAULT_WATCH)
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
        check_batches(batch_size, max_batches, largest=MAX_BATCH_SIZE)
        check_watch(watch, dry_run=dry_run)
        using = alias() if database is None else database
        check_database(using)
        run = _Run(self, using, batch_size, max_batches, options)
        with refusals_as_errors(using, "What was sent and is not marked will be sent again."):
            if dry_run:
                self._count(using)
            elif watch is None:
                run.once()
            else:
                run.watch(watch)

    def _count(self, using: str) -> None:
        found = backlog(using=using)
        ready = due(using)[:MAX_COUNTED].count()
        self.stdout.write(f"{_messages(found.pending)} pending, of which {ready:,} can be sent now.")
        if found.oldest_due is not None:
            self.stdout.write(f"Due for {found.oldest_due.total_seconds():,.0f} s at most.")
        self.stdout.write(f"{_messages(found.dead)} dead.")


class _Run(Run[RelayResult]):
    exit_code = EXIT_UNREACHABLE

    def nothing(self) -> RelayResult:
        return RelayResult()

    def batches(self) -> Iterator[RelayResult]:
        return relay_batches(batch_size=self.batch_size, using=self.using)

    def progress(self) -> AbstractContextManager[Report]:
        return progress(
            "Sending",
            due(self.using)[:MAX_COUNTED].count,
            self.command.write,
            self.options,
            every=REPORT_EVERY,
            leaves_bar=False,  # --watch would leave one after the other
        )

    def described(self, result: RelayResult) -> str:
        parts = [f"Sent {_messages(result.sent)}"]
        fates = ((result.postponed, "to be tried again"), (result.put_back, "not tried"), (result.dead, "dead"))
        parts += [f"{count:,} {fate}" for count, fate in fates if count]
        return f"{', '.join(parts)}."

    def described_so_far(self, result: RelayResult) -> str:
        return f"So far: {self.described(result)}"

    def complaints(self, result: RelayResult) -> Mapping[Hashable, str]:
        return {
            sender: f"Sender {sender} can't reach its broker: {error}"
            for sender, error in sorted(result.unavailable.items())
        }


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"
