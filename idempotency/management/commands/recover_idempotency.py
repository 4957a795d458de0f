"""``manage.py recover_idempotency``: parse arguments, recover batch after batch, report."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from django.core.management.base import CommandParser

from ...operation import registry
from ...protocol.claims import alias
from ...upkeep.counters import counters
from ...upkeep.sweep import (
    DEFAULT_BATCH_SIZE,
    MAX_BATCH_SIZE,
    MAX_LISTED,
    RecoveryResult,
    abandoned,
    recover_batches,
)
from ..progress import REPORT_EVERY, Report, progress
from ..running import (
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_UNKNOWN_OPERATIONS,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    BatchCommand,
    Stop,
    add_batch_size,
    check_batches,
    check_database,
    refusals_as_errors,
)
from ..watching import Run, add_watch, check_watch

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


class Command(BatchCommand):
    help = (
        "Settle claims whose lease is over, as their operations declare: run again, asked for, or parked.\n"
        "May run at any time, and more than once at a time; a killed run is simply run again."
    )
    epilog = EPILOG

    def add_arguments(self, parser: CommandParser) -> None:
        add_batch_size(parser, "claims to settle between two looks for a signal", DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE)
        parser.add_argument("--max-batches", type=int, metavar="N", help="end a sweep after N batches (default: none)")
        parser.add_argument("--dry-run", action="store_true", help="count what is abandoned, settle nothing")
        add_watch(parser, "sweep", DEFAULT_WATCH)
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
        check_batches(batch_size, max_batches, largest=MAX_BATCH_SIZE)
        check_watch(watch, dry_run=dry_run)
        using = alias() if database is None else database
        check_database(using)
        sweep = _Sweep(self, using, batch_size, max_batches, options)
        with refusals_as_errors(using, "What was settled before stays settled."):
            if dry_run:
                self._count(using)
            elif watch is None:
                sweep.once()
            else:
                sweep.watch(watch)

    def _count(self, using: str) -> None:
        found = Counter(abandoned(using).values_list("operation", flat=True)[:MAX_LISTED])
        total = sum(found.values())
        self.stdout.write(f"{'At least ' if total == MAX_LISTED else ''}{_claims(total)} abandoned.")
        for name, count in sorted(found.items()):
            operation = registry.get(name)
            fate = "left alone, not declared here" if operation is None else operation.recovery.value
            self.stdout.write(f"  {name}: {count:,} ({fate})")


class _Sweep(Run[RecoveryResult]):
    exit_code = EXIT_UNKNOWN_OPERATIONS

    def nothing(self) -> RecoveryResult:
        return RecoveryResult()

    def batches(self) -> Iterator[RecoveryResult]:
        return recover_batches(batch_size=self.batch_size, using=self.using)

    def take(self, stop: Stop) -> RecoveryResult:
        result = super().take(stop)
        counters.flush()
        return result

    def progress(self) -> AbstractContextManager[Report]:
        return progress(
            "Recovering",
            abandoned(self.using).order_by()[:MAX_LISTED].count,
            self.command.write,
            self.options,
            every=REPORT_EVERY,
            leaves_bar=False,  # --watch would leave one after the other
        )

    def described(self, result: RecoveryResult) -> str:
        return f"Settled {_described(result)}."

    def described_so_far(self, result: RecoveryResult) -> str:
        return f"Settled {_described(result)} so far."

    def complaints(self, result: RecoveryResult) -> Mapping[Hashable, str]:
        return {entry: _left_alone(*entry) for entry in sorted(result.unknown_operations.items())}


def _described(result: RecoveryResult) -> str:
    counts = f"{result.recoverable:,} recoverable, {result.completed:,} completed, {result.parked:,} parked"
    postponed = f", {result.postponed:,} to be asked for again" if result.postponed else ""
    return f"{_claims(result.touched)}: {counts}{postponed}"


def _left_alone(name: str, count: int) -> str:
    return (
        f"Left alone: {_claims(count)} of operation {name!r}, which is not declared in this process. "
        f"Declare it in an app's operations.py."
    )


def _claims(count: int) -> str:
    return "1 claim" if count == 1 else f"{count:,} claims"
