"""``manage.py recover_idempotency``: settle abandoned claims in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ...operate import statistics
from ...operate.sweep import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, MAX_LISTED, RecoveryResult, abandoned, recover_batches
from ...operation import registry
from ..running import EXIT_CODES, EXIT_UNKNOWN_OPERATIONS, BatchCommand, Stop, Work, counted


class Command(BatchCommand[RecoveryResult]):
    help = (
        "Settle claims whose lease is over, as their operations declare: make them recoverable, call a reconciler, or "
        f"park them. Runs may overlap, and a killed run can be repeated. {EXIT_CODES}, 4 claims of undeclared "
        "operations remain."
    )
    batch_of = "claims to settle in one batch"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE
    default_watch: ClassVar[float] = 10.0  # the maximum wait of an abandoned claim
    exit_code = EXIT_UNKNOWN_OPERATIONS

    def handle(self, *args: object, **options: Any) -> None:
        registry.load()
        super().handle(*args, **options)

    def works(self) -> Iterator[Work[RecoveryResult]]:
        batches = recover_batches(batch_size=self.batch_size, using=self.using)
        yield Work(batches, _describe)

    def take(self, work: Work[RecoveryResult], stop: Stop) -> RecoveryResult:
        result = super().take(work, stop)
        statistics.write_counts()
        return result

    def complaints(self, result: RecoveryResult) -> Mapping[str, str]:
        return {
            f"{name} {count}": f"Skipped {counted(count, 'claim')} of operation {name!r}, which is not declared in "
            f"this process. Declare it in an app's operations.py, or import the module of its task."
            for name, count in sorted(result.unknown_operations.items())
        }

    def count(self) -> None:
        operations = Counter(abandoned(self.using).values_list("operation", flat=True)[:MAX_LISTED])
        total = sum(operations.values())
        self.write(f"{'At least ' if total == MAX_LISTED else ''}{counted(total, 'claim')} abandoned.")
        for name, count in sorted(operations.items()):
            operation = registry.get(name)
            fate = "skipped, not declared here" if operation is None else operation.recovery.value
            self.write(f"  {name}: {count:,} ({fate})")


def _describe(result: RecoveryResult) -> str:
    counts = f"{result.recoverable:,} recoverable, {result.completed:,} completed, {result.parked:,} parked"
    postponed = f", {result.postponed:,} postponed" if result.postponed else ""
    return f"Settled {counted(result.touched, 'claim')}: {counts}{postponed}."
