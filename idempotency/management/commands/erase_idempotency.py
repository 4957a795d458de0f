"""``manage.py erase_idempotency``: erase an account, and report the reasons why rows remain."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from ...operate.erasure import DEFAULT_BATCH_SIZE, ERASED, MAX_BATCH_SIZE, UNRESOLVED, erase_account, find_rows
from ...options import validators
from ..running import (
    EXIT_CODES,
    EXIT_ROWS_LEFT,
    Stop,
    add_batch_size,
    check_batch_size,
    check_database,
    counted,
    refusals_as_errors,
    require,
)

_NEWER = "in a state of a newer release. Finish the deploy, then run this again."

#: Remaining rows in the singular and plural, and the next step, by the names of ``AccountRows.count``.
REASONS = {
    "live": ("claim is", "claims are", "live. Run this again when the lease is over."),
    "abandoned": ("claim is", "claims are", "abandoned. Run recover_idempotency first, or use --include-unresolved."),
    "parked": ("record is", "records are", "parked. Resolve every parked record first, or use --include-unresolved."),
    "finished": ("record is", "records are", "in use, or needed by an undelivered message. Run this again later."),
    "pending": ("message is", "messages are", "not sent yet. Run relay_outbox first."),
    "dead": ("message is", "messages are", "dead. Requeue every dead message first, or use --include-unresolved."),
    "sent": ("sent message is", "sent messages are", "in use. Run this again later."),
    "unknown_records": ("record is", "records are", _NEWER),
    "unknown_messages": ("message is", "messages are", _NEWER),
}


class Command(BaseCommand):
    help = (
        "Erase an account's idempotency records with their steps, and its messages. Close the account first, because "
        "a later retry or delivery runs again. Live claims and unsent messages are never erased. A killed run can be "
        f"repeated. {EXIT_CODES}, 3 rows remain."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("account_id", help="the account, as its records name it")
        parser.add_argument("--reason", default="", help="the reason, for the log idempotency.audit")
        parser.add_argument("--dry-run", action="store_true", help="count the rows to erase without erasing them")
        parser.add_argument(
            "--include-unresolved",
            action="store_true",
            help="also erase abandoned claims, parked records and dead messages",
        )
        add_batch_size(parser, "rows to erase in one transaction", DEFAULT_BATCH_SIZE, MAX_BATCH_SIZE)
        parser.add_argument("--database", metavar="ALIAS", help="default: the databases of records and messages")

    def handle(self, *args: object, **options: Any) -> None:
        account_id, database = options["account_id"], options["database"]
        check_batch_size(options["batch_size"], MAX_BATCH_SIZE)
        check_database(DEFAULT_DB_ALIAS if database is None else database)
        problem = validators.name(account_id)
        require(problem is None, f"The account {problem}, not {account_id!r}.")
        with refusals_as_errors(database or DEFAULT_DB_ALIAS):
            if options["dry_run"]:
                left = find_rows(account_id, using=database).count()
                erased = ERASED | UNRESOLVED if options["include_unresolved"] else ERASED
                erasable = [f"{left.pop(name):,} {name}" for name in list(left) if name in erased]
                self.stdout.write(f"Would erase {', '.join(erasable) or 'nothing'}.")
                self._report_left(left)
            else:
                self._erase(account_id, options)

    def _report_left(self, left: Mapping[str, int]) -> None:
        for name, count in left.items():
            one, several, why = REASONS[name]
            self.stdout.write(f"Left: {count:,} {one if count == 1 else several} {why}")

    def _erase(self, account_id: str, options: Mapping[str, Any]) -> None:
        with Stop() as stop:
            total, left = erase_account(
                account_id,
                by="manage.py erase_idempotency",
                reason=options["reason"],
                include_unresolved=options["include_unresolved"],
                batch_size=options["batch_size"],
                using=options["database"],
                is_stopped=lambda: stop.signum is not None,
            )
        self.stdout.write(f"Erased {counted(total.records, 'record')} and {counted(total.messages, 'message')}.")
        self._report_left(left)
        stop.end_command("Run it again.")
        if left:
            sys.exit(EXIT_ROWS_LEFT)
