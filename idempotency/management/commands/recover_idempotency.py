"""``manage.py recover_idempotency``: recover batch after batch, and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ...operate import statistics
from ...operate.sweep import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, MAX_LISTED, RecoveryResult, abandoned, recover_batches
from ...operation import registry
from ..running import EXIT_UNKNOWN_OPERATIONS, BatchCommand, Stop, Work, counted, describe_exit_codes


class Command(BatchCommand[RecoveryResult]):
    help = (
        "Settle claims whose lease is over, as their operations declare: make them recoverable, ask a reconciler, or "
        "park them.\n"
        "The command may run at any time, and several runs may overlap. If a run was killed, run it again."
    )
    epilog: ClassVar[str] = describe_exit_codes(
        {
            0: "every abandoned claim of a known operation is settled, or its reconciler is asked again later",
            EXIT_UNKNOWN_OPERATIONS: "claims are left of operations that are not declared in this process",
        },
        "With --watch the command sweeps until SIGINT or SIGTERM, and the exit code is then 0. If the database\n"
        "refuses, the command reports it and tries again at the next sweep.",
    )
    batch_of = "claims to settle between two looks for a signal"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE
    default_watch: ClassVar[float] = 10.0  # an abandoned claim waits this long at most
    exit_code = EXIT_UNKNOWN_OPERATIONS

    def handle(self, *args: object, **options: Any) -> None:
        registry.load()
        super().handle(*args, **options)

    def works(self) -> Iterator[Work[RecoveryResult]]:
        batches = recover_batches(batch_size=self.batch_size, using=self.using)
        yield Work("Recovering", batches, abandoned(self.using)[:MAX_LISTED], _describe)

    def take(self, work: Work[RecoveryResult], stop: Stop) -> RecoveryResult:
        result = super().take(work, stop)
        statistics.write_counts()
        return result

    def complaints(self, result: RecoveryResult) -> Mapping[str, str]:
        return {
            f"{name} {count}": f"Left alone: {counted(count, 'claim')} of operation {name!r}, which is not declared in "
            f"this process. Declare it in an app's operations.py, or import the module of its task."
            for name, count in sorted(result.unknown_operations.items())
        }

    def count(self) -> None:
        operations = Counter(abandoned(self.using).values_list("operation", flat=True)[:MAX_LISTED])
        total = sum(operations.values())
        self.write(f"{'At least ' if total == MAX_LISTED else ''}{counted(total, 'claim')} abandoned.")
        for name, count in sorted(operations.items()):
            operation = registry.get(name)
            fate = "left alone, not declared here" if operation is None else operation.recovery.value
            self.write(f"  {name}: {count:,} ({fate})")


def _describe(result: RecoveryResult) -> str:
    counts = f"{result.recoverable:,} recoverable, {result.completed:,} completed, {result.parked:,} parked"
    postponed = f", {result.postponed:,} to be asked for again" if result.postponed else ""
    return f"Settled {counted(result.touched, 'claim')}: {counts}{postponed}."
