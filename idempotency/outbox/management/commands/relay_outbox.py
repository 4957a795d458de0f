"""``manage.py relay_outbox``: send due messages in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ....management.running import EXIT_CODES, BatchCommand, Work, counted
from ...models import outbox_database
from ...relay import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, RelayResult, due, relay_batches
from ...upkeep import MAX_COUNTED, backlog

EXIT_UNREACHABLE = 5


class Command(BatchCommand[RelayResult]):
    help = (
        "Send the due messages of the outbox. Runs may overlap, and a killed run can be repeated. "
        f"{EXIT_CODES}, 5 a broker or receiver can't be reached."
    )
    batch_of = "messages to send in one batch"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE
    default_watch: ClassVar[float] = 1.0  # the maximum wait of a due message without a nudge
    refused = "Messages that were sent but not marked are sent again."
    exit_code = EXIT_UNREACHABLE

    def default_database(self) -> str:
        return outbox_database()

    def works(self) -> Iterator[Work[RelayResult]]:
        batches = relay_batches(batch_size=self.batch_size, using=self.using)
        yield Work(batches, _describe)

    def complaints(self, result: RelayResult) -> Mapping[str, str]:
        return {
            str(place): f"{place} can't be reached: {error}" for place, error in sorted(result.paused.items(), key=str)
        }

    def count(self) -> None:
        waiting = backlog(using=self.using)
        ready = due(self.using)[:MAX_COUNTED].count()
        self.write(f"{counted(waiting.pending, 'message')} pending, {ready:,} ready to send.")
        if waiting.oldest_due is not None:
            self.write(f"The oldest has been due for {waiting.oldest_due.total_seconds():,.0f} s.")
        self.write(f"{counted(waiting.dead, 'message')} dead.")


def _describe(result: RelayResult) -> str:
    parts = [f"Sent {counted(result.sent, 'message')}"]
    others = ((result.postponed, "postponed"), (result.put_back, "not tried"), (result.dead, "dead"))
    parts += [f"{count:,} {what}" for count, what in others if count]
    return f"{', '.join(parts)}."
