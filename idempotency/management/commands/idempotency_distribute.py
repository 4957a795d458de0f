"""``manage.py idempotency_distribute``: spread the tables over the servers of a Citus cluster."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import NotSupportedError, connections, transaction

from ... import sql
from ...protocol.transactions import alias
from ..running import EXIT_REFUSED, check_database, refusals_as_errors


class Command(BaseCommand):
    help = (
        "Spread records and steps over the workers of a Citus cluster, by account.\n"
        "Everything happens in one transaction. Citus moves the rows that the tables have, and claims wait meanwhile. "
        "The command may run again: it leaves tables alone that are distributed already."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="print the statements, and change nothing")
        parser.add_argument("--database", metavar="ALIAS", help="default: the database that records are written to")

    def handle(self, *args: object, dry_run: bool, database: str | None, **options: Any) -> None:
        using = alias() if database is None else database
        check_database(using)
        store = sql.store(using)
        with refusals_as_errors(using, "Nothing was changed."):
            try:
                statements = store.plan_distribution()
            except NotSupportedError as error:
                raise CommandError(str(error), returncode=EXIT_REFUSED) from error
            if dry_run:
                self.stdout.write("".join(f"{statement};\n" for statement in ["BEGIN", *statements, "COMMIT"]))
                return
            with transaction.atomic(using=using, durable=True), connections[using].cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
            outside = store.tables_outside_of_citus()
        if options["verbosity"]:
            done = "are distributed" if statements else "were distributed already"
            self.stdout.write(f"The tables in database {using!r} {done}.")
        if outside:
            self.stderr.write(
                f"Citus doesn't know these tables of the project: {', '.join(outside)}. A transaction that writes to "
                f"one of them is not committed as a whole if the coordinator crashes: see the check idempotency.W014."
            )
