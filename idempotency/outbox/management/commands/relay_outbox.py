"""``manage.py relay_outbox``: send batch after batch, and report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ....management.running import BatchCommand, Work, counted, describe_exit_codes
from ...models import outbox_database
from ...relay import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, RelayResult, due, relay_batches
from ...upkeep import MAX_COUNTED, backlog

EXIT_UNREACHABLE = 5


class Command(BatchCommand[RelayResult]):
    help = (
        "Send the messages of the outbox that are due.\n"
        "The command may run at any time, and several runs may overlap. If a run was killed, run it again."
    )
    epilog: ClassVar[str] = describe_exit_codes(
        {
            0: "everything that was due is sent, or is tried again later, or is dead",
            EXIT_UNREACHABLE: "a broker can't be reached",
        },
        "With --watch the command runs until SIGINT or SIGTERM, and the exit code is then 0. If the database\n"
        "refuses or a broker can't be reached, the command reports it and tries again.",
    )
    batch_of = "messages to send between two looks for a signal"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE
    default_watch: ClassVar[float] = 1.0  # without a nudge, a due message waits this long at most
    refused = "Messages that were sent and are not marked are sent again."
    exit_code = EXIT_UNREACHABLE

    def default_database(self) -> str:
        return outbox_database()

    def works(self) -> Iterator[Work[RelayResult]]:
        batches = relay_batches(batch_size=self.batch_size, using=self.using)
        yield Work("Sending", batches, due(self.using)[:MAX_COUNTED], _describe)

    def complaints(self, result: RelayResult) -> Mapping[str, str]:
        return {
            sender: f"Sender {sender} can't reach its broker: {error}"
            for sender, error in sorted(result.unavailable.items())
        }

    def count(self) -> None:
        waiting = backlog(using=self.using)
        ready = due(self.using)[:MAX_COUNTED].count()
        self.write(f"{counted(waiting.pending, 'message')} pending, of which {ready:,} can be sent now.")
        if waiting.oldest_due is not None:
            self.write(f"Due for {waiting.oldest_due.total_seconds():,.0f} s at most.")
        self.write(f"{counted(waiting.dead, 'message')} dead.")


def _describe(result: RelayResult) -> str:
    parts = [f"Sent {counted(result.sent, 'message')}"]
    fates = ((result.postponed, "to be tried again"), (result.put_back, "not tried"), (result.dead, "dead"))
    parts += [f"{count:,} {fate}" for count, fate in fates if count]
    return f"{', '.join(parts)}."
