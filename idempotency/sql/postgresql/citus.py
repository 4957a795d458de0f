"""Citus: what is different if an extension spreads the tables over servers.

A coordinator plans each statement and sends it to the workers that hold its rows, which are in shards by account. The
package's statements on one record go to one shard, so they are the same with Citus and without it. This module has the
rest: the settings of a transaction, which Citus does not send along by itself; locks, which Citus takes in one shard
only; and what is done shard by shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.apps import apps
from django.db import NotSupportedError, OperationalError, router
from django.db.models import QuerySet

from ..store import Part, Store

_Found = TypeVar("_Found")

_HAS_CITUS = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"

#: The server's place in the cluster (0 is the coordinator), and how many servers may hold shards.
_CLUSTER = """
SELECT (SELECT groupid FROM pg_dist_local_group),
    (SELECT count(*) FROM pg_dist_node WHERE isactive AND shouldhaveshards)
"""

_KNOWN_TABLES = "SELECT relname FROM pg_dist_partition JOIN pg_class ON pg_class.oid = logicalrelid"

# A record and its steps are in one shard, and the transactions of all requests of an account change one worker only.
# The outbox is one shard on the coordinator, because a relay sends in the order of all accounts and takes messages by
# their locks. Citus has to know it: otherwise it would commit on the worker first, and a crash of the coordinator could
# lose the message of a completed operation. Rows that the tables had are moved; truncate_local_data_… frees their room.
_DISTRIBUTION = {
    "idempotency_record": (
        "SELECT create_distributed_table('idempotency_record', 'account_id')",
        "SELECT truncate_local_data_after_distributing_table('idempotency_record')",
    ),
    "idempotency_step": (
        "SELECT create_distributed_table('idempotency_step', 'account_id', colocate_with => 'idempotency_record')",
        "SELECT truncate_local_data_after_distributing_table('idempotency_step')",
    ),
    "idempotency_counter": (
        "SELECT create_reference_table('idempotency_counter')",
        "SELECT truncate_local_data_after_distributing_table('idempotency_counter')",
    ),
    "idempotency_outbox": ("SELECT citus_add_local_table_to_metadata('idempotency_outbox')",),
}

_IS_DISTRIBUTED = "SELECT count(*) FROM pg_dist_partition WHERE logicalrelid = to_regclass(%s) AND partmethod = 'h'"

_SHARDS = """
SELECT shard_name(records.logicalrelid, records.shardid), shard_name(steps.logicalrelid, steps.shardid), records.shardid
FROM pg_dist_shard AS records
JOIN pg_dist_shard AS steps USING (shardminvalue, shardmaxvalue)
WHERE records.logicalrelid = 'idempotency_record'::regclass AND steps.logicalrelid = 'idempotency_step'::regclass
ORDER BY records.shardid
"""

_SHARDS_OF_ACCOUNTS = """
SELECT get_shard_id_for_distribution_column(%s::regclass, account), account FROM unnest(%s::text[]) AS account
"""

# A statement that takes rows of one shard by their locks is run by the worker that has the shard, in a transaction of
# its own, because the coordinator can't plan it. Its time is the coordinator's, as it is for every other statement.
_WORKER = "SELECT nodename, nodeport, statement_timestamp()::text FROM pg_dist_shard_placement WHERE shardid = %s"
_RUN_ON_WORKER = "SELECT success, result FROM master_run_on_worker(ARRAY[%s], ARRAY[%s], ARRAY[%s], false)"

#: Whether a database has the extension, by its place. A process asks each database once.
_has_citus: dict[tuple[str, ...], bool] = {}


class Setting(NamedTuple):
    """A setting of one transaction."""

    name: str
    value: str


@dataclass(frozen=True)
class Shard(Part):
    """A part of the table of records on a worker."""

    id: int = 0


class Citus(Store):
    """What the statements need to know of Citus."""

    @property
    def has_citus(self) -> bool:
        """Whether the database has the extension, whether or not the tables are distributed already.

        The driver is asked and not Django's cursor, so that a test that counts statements does not count this one.
        """
        connection: Any = self.connection
        place = tuple(str(connection.settings_dict[name]) for name in ("HOST", "PORT", "NAME"))
        if place not in _has_citus:
            connection.ensure_connection()
            with connection.wrap_database_errors:
                ((_has_citus[place],),) = connection.connection.execute(_HAS_CITUS).fetchall()
        return _has_citus[place]

    def is_distributed(self, table: str) -> bool:
        """Whether the rows of the table are in shards. This is not kept, because only upkeep asks."""
        if not self.has_citus:
            return False
        with self.connection.cursor() as cursor:
            cursor.execute(_IS_DISTRIBUTED, [table])
            return bool(cursor.fetchall()[0][0])

    def plan_distribution(self) -> list[str]:
        database = f"Database {self.using!r}"
        if not self.has_citus:
            raise NotSupportedError(
                f"{database} has no extension citus. Put it into shared_preload_libraries of every server, create it "
                f"in this database on every server, and add the workers with citus_add_node()."
            )
        with self.connection.cursor() as cursor:
            cursor.execute(_CLUSTER)
            ((group, nodes),) = cursor.fetchall()
        if group:
            raise NotSupportedError(f"{database} is on a worker of the cluster. Connect to the coordinator.")
        if not nodes:
            raise NotSupportedError(f"{database} has no server for shards. Add workers with citus_add_node().")
        known = self._known_tables()
        return [one for table, statements in _DISTRIBUTION.items() if table not in known for one in statements]

    def tables_outside_of_citus(self) -> list[str]:
        if not self.is_distributed("idempotency_record"):
            return []
        models = [model for model in apps.get_models() if router.allow_migrate_model(self.using, model)]
        written = {model._meta.db_table for model in models if model._meta.managed}
        with self.connection.cursor() as cursor:
            present = self.connection.introspection.table_names(cursor)
        return sorted(written.intersection(present) - self._known_tables())

    def _known_tables(self) -> set[str]:
        with self.connection.cursor() as cursor:
            cursor.execute(_KNOWN_TABLES)
            return {name for (name,) in cursor.fetchall()}

    @property
    def sends_settings_along(self) -> bool:
        """Whether a message can hold several statements. It can't if the server binds the parameters."""
        features: Any = self.connection.features
        return not features.uses_server_side_binding

    def execute_on_citus(self, cursor: Any, statement: str, parameters: Any, *settings: Setting) -> None:
        """Execute a statement under settings of its transaction, on the workers too.

        Citus sends a setting to the workers if a SET LOCAL has made it, and not if ``set_config()`` has. It sends the
        whole message that holds the SET LOCAL, so the settings are in a block of their own.
        """
        local = "".join(f" SET LOCAL {setting.name} TO '{setting.value}';" for setting in settings)
        block = f"DO $$ BEGIN SET LOCAL citus.propagate_set_commands TO 'local';{local} END $$"
        if self.sends_settings_along:
            cursor.execute(f"{block}; {statement}", parameters)
            cursor.nextset()  # the first result is that of the block
        else:
            cursor.execute(block)
            cursor.execute(statement, parameters)

    def parts(self) -> list[Part]:
        return [*self.shards()] or super().parts()

    def shards(self) -> list[Shard]:
        """The shards of the table of records; none if it is not distributed."""
        if not self.is_distributed("idempotency_record"):
            return []
        with self.connection.cursor() as cursor:
            cursor.execute(_SHARDS)
            return [Shard(*row) for row in cursor.fetchall()]

    def run_in_shard(self, shard: Shard, statement: Callable[[str], str], parameters: Any) -> Any:
        """Run a statement on the worker that has the shard.

        If the process dies or sleeps at any point here, the worker ends the statement, or never gets it.

        :param statement: returns the statement, which has one row with one value; its argument is the time, as SQL.
        :returns: the value, as text.
        :raises OperationalError: the worker refuses.
        """
        operations: Any = self.connection.ops
        with self.connection.cursor() as cursor:
            cursor.execute(_WORKER, [shard.id])
            ((node, port, now),) = cursor.fetchall()
            command = operations.compose_sql(statement(f"'{now}'::timestamptz"), parameters)
            cursor.execute(_RUN_ON_WORKER, [node, port, command])
            ((success, result),) = cursor.fetchall()
        if not success:
            raise OperationalError(f"Server {node} refused: {result}")
        return result

    def lock_free(self, rows: QuerySet[Any, _Found], limit: int | None = None) -> list[_Found]:
        if not self.is_distributed(rows.model._meta.db_table):
            return super().lock_free(rows, limit)
        # Rows are found in all shards at once, and then locked in one shard after the other.
        return self._lock_found(rows, limit, ["pk", "account_id"], partial(self._lock_in_shards, rows))

    def _lock_in_shards(self, rows: QuerySet[Any, _Found], found: list[tuple[Any, ...]]) -> list[_Found]:
        """Lock rows that were found. The statements repeat the conditions, because a row may have changed since."""
        shards: dict[int, list[str]] = defaultdict(list)
        with self.connection.cursor() as cursor:
            accounts = sorted({account for _, account in found})
            cursor.execute(_SHARDS_OF_ACCOUNTS, [rows.model._meta.db_table, accounts])
            for shard, account in cursor.fetchall():
                shards[shard].append(account)
        locked: list[_Found] = []
        for _, accounts in sorted(shards.items()):
            ids = [pk for pk, account in found if account in accounts]
            locked += super().lock_free(rows.filter(account_id__in=accounts, pk__in=ids))
        return locked
