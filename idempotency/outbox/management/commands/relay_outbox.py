"""``manage.py relay_outbox``: send batch after batch, and report."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ....management.running import EXIT_REFUSED, EXIT_WORK_LEFT, BatchCommand, Work, counted, describe_exit_codes
from ...backlog import MAX_COUNTED, backlog
from ...models import outbox_database
from ...relay import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, RelayResult, due, relay_batches

EXIT_UNREACHABLE = 5

EPILOG = describe_exit_codes(
    {
        0: "everything that was due is sent, or will be tried again, or is dead",
        EXIT_REFUSED: "the database refused; what was sent and is not marked will be sent again",
        EXIT_WORK_LEFT: "stopped by --max-batches, and more is due",
        EXIT_UNREACHABLE: "a broker can't be reached",
    },
    "With --watch the command runs until SIGINT or SIGTERM, and the exit code is then 0. If the database\n"
    "refuses or a broker can't be reached, the command reports it and tries again.",
)


class Command(BatchCommand[RelayResult]):
    help = (
        "Send the messages of the outbox that are due.\n"
        "The command may run at any time, and several runs may overlap. If a run was killed, run it again."
    )
    epilog = EPILOG
    batch_of = "messages to send between two looks for a signal"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE
    max_batches_help = "end a run after N batches (default: none)"
    dry_run_help = "count what waits, and send nothing"
    watch_verb = "run"
    default_watch = 1.0  # without a nudge, a due message waits this long at most
    refused = "What was sent and is not marked will be sent again."
    exit_code = EXIT_UNREACHABLE

    def default_database(self) -> str:
        return outbox_database()

    def work(self) -> Work[RelayResult]:
        return Work(
            "Sending",
            relay_batches(batch_size=self.batch_size, using=self.using),
            due(self.using)[:MAX_COUNTED].count,
            lambda result: f"So far: {self.describe(result)}",
        )

    def describe(self, result: RelayResult) -> str:
        parts = [f"Sent {counted(result.sent, 'message')}"]
        fates = ((result.postponed, "to be tried again"), (result.put_back, "not tried"), (result.dead, "dead"))
        parts += [f"{count:,} {fate}" for count, fate in fates if count]
        return f"{', '.join(parts)}."

    def complaints(self, result: RelayResult) -> Mapping[Hashable, str]:
        return {
            sender: f"Sender {sender} can't reach its broker: {error}"
            for sender, error in sorted(result.unavailable.items())
        }

    def count(self) -> None:
        waiting = backlog(using=self.using)
        ready = due(self.using)[:MAX_COUNTED].count()
        self.stdout.write(f"{counted(waiting.pending, 'message')} pending, of which {ready:,} can be sent now.")
        if waiting.oldest_due is not None:
            self.stdout.write(f"Due for {waiting.oldest_due.total_seconds():,.0f} s at most.")
        self.stdout.write(f"{counted(waiting.dead, 'message')} dead.")
