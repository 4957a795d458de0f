"""``manage.py idempotency_partition``: split the tables of records and steps into hash partitions by account."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import NotSupportedError, connections, transaction

from ... import sql
from ...models import IdempotencyRecord, IdempotencyStep
from ...protocol.transactions import alias
from ..running import EXIT_REFUSED, EXIT_USAGE, check_database, refusals_as_errors

MAX_PARTITIONS = 1024


class Command(BaseCommand):
    help = (
        "Split the tables of records and steps into hash partitions by account, on PostgreSQL.\n"
        "Everything happens in one transaction, during which claims wait. Tables with rows need --copy."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--partitions", type=int, required=True, metavar="N", help="2 to 1024")
        parser.add_argument("--copy", action="store_true", help="copy the rows; claims wait until all are copied")
        parser.add_argument("--dry-run", action="store_true", help="print the statements, and change nothing")
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(
        self, *args: object, partitions: int, copy: bool, dry_run: bool, database: str | None, **options: Any
    ) -> None:
        if not 2 <= partitions <= MAX_PARTITIONS:
            raise CommandError(f"--partitions must be between 2 and {MAX_PARTITIONS}.", returncode=EXIT_USAGE)
        using = alias() if database is None else database
        check_database(using)
        with refusals_as_errors(using, "Nothing was changed."):
            try:
                statements = sql.store(using).plan_partitions(partitions)
            except NotSupportedError as error:
                raise CommandError(str(error), returncode=EXIT_REFUSED) from error
            if dry_run:
                self.stdout.write("".join(f"{statement};\n" for statement in ["BEGIN", *statements, "COMMIT"]))
                return
            # A row that is written after this look is copied, too.
            if not copy and any(
                model._base_manager.using(using).exists() for model in (IdempotencyRecord, IdempotencyStep)
            ):
                raise CommandError(
                    "The tables have rows. Say --copy to copy them. Claims wait until all are copied.",
                    returncode=EXIT_REFUSED,
                )
            with transaction.atomic(using=using, durable=True), connections[using].cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
        if options["verbosity"]:
            self.stdout.write(f"The tables in database {using!r} now have {partitions} partitions each.")
