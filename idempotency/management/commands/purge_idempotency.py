"""``manage.py purge_idempotency``: purge batch after batch, and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Count, QuerySet
from django.db.models.functions import Now

from ...lifecycle import Status
from ...models import IdempotencyRecord
from ...outbox.backlog import purge_sent_batches, sent_past_retention
from ...protocol.transactions import alias
from ...upkeep.bodies import bodies_past_retention, purge_body_batches
from ...upkeep.retention import DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE, MAX_JOBS, PurgeResult, due, purge_batches
from ..running import (
    EXIT_REFUSED,
    EXIT_USAGE,
    EXIT_WORK_LEFT,
    MAX_PAUSE,
    BatchCommand,
    Stop,
    Work,
    describe_exit_codes,
    stop_between_batches,
)

EPILOG = describe_exit_codes(
    {
        0: "everything that was due is purged",
        EXIT_REFUSED: "the database refused; what earlier batches deleted stays deleted",
        EXIT_WORK_LEFT: "stopped by --max-batches, and more is due",
    }
)


class Command(BatchCommand[PurgeResult]):
    help = (
        "Delete idempotency records past their retention, recorded responses past a shorter one of their own, and "
        "messages that were sent longer ago than TTL and a day. The oldest go first, in bounded batches.\n"
        "Claims and unsent messages are never deleted, and parked records only with --include-parked.\n"
        "The command may run at any time, and several runs may overlap."
    )
    epilog = EPILOG
    batch_of = "rows to delete in one transaction"
    default_batch = DEFAULT_BATCH_SIZE
    largest_batch = MAX_BATCH_SIZE
    max_batches_help = "stop after N batches of records, N of responses and N of messages (default: no limit)"
    dry_run_help = "count what is due, and delete nothing"
    leaves_bar = True
    refused = "What earlier batches deleted stays deleted."
    left = "More is due."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--pause", type=float, default=0.0, metavar="S", help="seconds to wait between batches (default: 0)"
        )
        parser.add_argument(
            "--jobs", type=int, default=1, metavar="N", help="purge N batches of records at a time (default: 1)"
        )
        parser.add_argument("--include-parked", action="store_true", help="delete parked records past retention too")

    def take_options(self, options: Mapping[str, Any]) -> None:
        self.pause, self.jobs, self.include_parked = options["pause"], options["jobs"], options["include_parked"]
        if not 1 <= self.jobs <= MAX_JOBS:
            raise CommandError(f"--jobs must be between 1 and {MAX_JOBS}.", returncode=EXIT_USAGE)
        if not 0 <= self.pause <= MAX_PAUSE:
            raise CommandError(f"--pause must be between 0 and {MAX_PAUSE:.0f} seconds.", returncode=EXIT_USAGE)

    def default_database(self) -> str:
        return alias()

    def work(self) -> Work[PurgeResult]:
        batches = purge_batches(
            batch_size=self.batch_size, include_parked=self.include_parked, jobs=self.jobs, using=self.using
        )
        return _work("record", batches, due(include_parked=self.include_parked, using=self.using))

    def run_once(self) -> None:
        records = due(include_parked=self.include_parked, using=self.using)
        others: list[tuple[str, QuerySet[Any], Callable[..., Iterator[PurgeResult]]]] = [
            ("recorded response", bodies_past_retention(self.using), purge_body_batches),
            ("sent message", sent_past_retention(self.using), purge_sent_batches),
        ]
        with stop_between_batches() as stop:
            left: list[QuerySet[Any]] = [] if self._purge("record", self.work(), stop) else [records]
            for name, rows, purge in others:
                batches = purge(batch_size=self.batch_size, using=self.using)
                if stop.signum is not None or (
                    rows.exists() and not self._purge(name, _work(name, batches, rows), stop)
                ):
                    left.append(rows)
        # Look again, because a full last batch may have taken the last row that was due.
        if any(rows.exists() for rows in left):
            self.end_with_work_left(stop, self.max_batches, self.left, verbosity=self.verbosity)

    def describe(self, result: PurgeResult, name: str = "record") -> str:
        return f"Purged {_count(result.deleted, name)} from database {self.using!r}."

    def _purge(self, name: str, work: Work[PurgeResult], stop: Stop) -> bool:
        """Purge records, responses or messages.

        :returns: whether nothing more was due at the end, or other purges hold the rest.
        """
        result = self.take(work, stop)
        if self.verbosity:
            self.write(self.describe(result, name))
        return result.exhausted

    def count(self) -> None:
        past_retention = IdempotencyRecord.objects.using(self.using).past_retention()
        counted = dict(past_retention.order_by().values_list("status").annotate(count=Count("pk")))
        kept = [Status.IN_PROGRESS] if self.include_parked else [Status.IN_PROGRESS, Status.PARKED]
        going = sum(counted.get(status, 0) for status in Status if status not in kept)
        self.stdout.write(f"Would purge {_count(going, 'record')} from database {self.using!r}.")
        for status in kept:
            if status in counted:
                kind = _count(counted[status], "record")
                self.stdout.write(f"Would keep {kind} past retention: {status.replace('_', ' ')}.")
        # The response of a record that is purged goes with it.
        if bodies := bodies_past_retention(self.using).filter(expires_at__gt=Now()).count():
            self.stdout.write(f"Would purge {_count(bodies, 'recorded response')} from database {self.using!r}.")
        if messages := sent_past_retention(self.using).count():
            self.stdout.write(f"Would purge {_count(messages, 'sent message')} from database {self.using!r}.")


def _work(name: str, batches: Iterator[PurgeResult], due: QuerySet[Any]) -> Work[PurgeResult]:
    return Work(f"Purging {name}s", batches, due.count, lambda result: f"Purged {_count(result.deleted, name)} so far.")


def _count(count: int, name: str) -> str:
    return f"1 {name}" if count == 1 else f"{count:,} {name}s"
