"""Citus: the differences on tables that are distributed over servers.

A coordinator plans each statement and sends it to the workers that hold its rows, which are sharded by account. The
package's statements on one record go to one shard, so they are the same with and without Citus. This module has the
rest: transaction settings, which Citus does not propagate by default, and locks, which Citus takes in only one shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from django.apps import apps
from django.db import router
from django.db.models import Q, QuerySet

from ...lifecycle import Status
from ..rows import Fence
from ..upkeep import PurgedRows, TableSize, Upkeep, by_ids
from .statements import SESSION, PostgreSQLStore, Setting, with_settings
from .upkeep import PostgreSQLUpkeep

_Found = TypeVar("_Found")

_IS_CLUSTER = "SELECT EXISTS (SELECT FROM pg_dist_partition) OR EXISTS (SELECT FROM pg_dist_node WHERE groupid > 0)"
_KNOWN_TABLES = "SELECT relname FROM pg_dist_partition JOIN pg_class ON pg_class.oid = logicalrelid"

_IS_DISTRIBUTED = "SELECT count(*) FROM pg_dist_partition WHERE logicalrelid = to_regclass(%s) AND partmethod = 'h'"

_SHARDS_OF_ACCOUNTS = """
SELECT get_shard_id_for_distribution_column(%s::regclass, account), account FROM unnest(%s::text[]) AS account
"""

# Each worker measures its shards. If one has no estimate or can't be queried, there is no total. Citus's size functions
# refuse a transaction that has written.
_MEASURE_SHARDS = """
SELECT CASE WHEN bool_and(size IS NOT NULL) THEN sum(size)::bigint END,
    CASE WHEN bool_and(records IS NOT NULL) THEN round(sum(records))::bigint END
FROM (
    SELECT (answer ->> 0)::bigint AS size, (answer ->> 1)::double precision AS records
    FROM (
        SELECT CASE WHEN success THEN result::json END AS answer
        FROM run_command_on_shards('idempotency_record', $shard$
            SELECT json_build_array(
                sum(pg_total_relation_size(oid)),
                CASE WHEN bool_and(relpages > 0 OR pg_relation_size(oid) = 0) THEN sum(
                    greatest(reltuples, 0) / greatest(relpages, 1)
                    * pg_relation_size(oid) / current_setting('block_size')::integer
                ) END
            )
            FROM pg_class
            WHERE relkind = 'r'
                AND oid IN (SELECT '%1$s'::regclass UNION SELECT relid FROM pg_partition_tree('%1$s'))
        $shard$)
    ) AS asked
) AS shards
"""


class CitusStore(PostgreSQLStore):
    """PostgreSQL with the extension, whether or not the tables are distributed."""

    def takes_several(self, cursor: Any) -> bool:
        return False  # a multi-shard update can't write the note, and Citus forwards a message as a whole

    @property
    def session(self) -> int | None:
        return None  # workers don't list the coordinator's sessions

    def end_lease_of_gone_session(self, observed: Fence) -> bool:
        return False  # a claim made before the table was distributed names one

    def _prepares(self, cursor: Any) -> bool:
        return False  # the statement that claims and reads does not go to a single shard

    @contextmanager
    def own_statement(self, what: object) -> Iterator[None]:
        with super().own_statement(what) if self._sends_settings_along else self.own_transaction(what):
            yield

    def _execute(self, cursor: Any, statement: str, parameters: Any, *settings: Setting) -> None:
        # Citus propagates SET LOCAL to the workers, but not set_config(), which it also refuses in an update. It
        # forwards the whole message that contains the SET LOCAL, so the settings are in a separate DO block.
        # With server-side binding, Citus refuses an update with a CASE of a function and a parameter. Here the
        # parameter is ``session``.
        alone = with_settings(statement.replace(SESSION, "%s::integer"), ())
        if self.is_nested:
            cursor.execute(alone, parameters)
            return
        local = "".join(f" SET LOCAL {name} TO '{value}';" for name, value in settings)
        block = f"DO $$ BEGIN SET LOCAL citus.propagate_set_commands TO 'local';{local} END $$"
        if self._sends_settings_along:
            cursor.execute(f"{block}; {alone}", parameters)
            cursor.nextset()  # skip the result of the block
        else:
            cursor.execute(block)
            cursor.execute(alone, parameters)

    @property
    def _sends_settings_along(self) -> bool:
        """Whether a message can hold several statements. It can't with server-side binding.

        In that case the settings are a separate message, which must be in the statement's transaction.
        """
        features: Any = self.connection.features
        return not features.uses_server_side_binding


class CitusUpkeep(PostgreSQLUpkeep):
    """A database with the extension. Its tables need not be distributed."""

    def is_distributed(self, table: str) -> bool:
        # This is not cached, because only upkeep calls it.
        return bool(self.store.row_of(_IS_DISTRIBUTED, [table])[0])

    def tables_outside_of_citus(self) -> list[str]:
        if not self.store.row_of(_IS_CLUSTER)[0]:  # the extension is not used
            return []
        with self.connection.cursor() as cursor:
            cursor.execute(_KNOWN_TABLES)
            known = {name for (name,) in cursor.fetchall()}
            present = self.connection.introspection.table_names(cursor)
        models = [model for model in apps.get_models(include_auto_created=True) if model._meta.managed]
        written = {model._meta.db_table for model in models if router.allow_migrate_model(self.using, model)}
        return sorted(written.intersection(present) - known)

    def measure(self) -> TableSize:
        if not self.is_distributed("idempotency_record"):
            return super().measure()
        return TableSize(*self.store.row_of(_MEASURE_SHARDS))

    def end_leases_of_gone_sessions(self, operations: Collection[str], limit: int) -> None:
        pass

    def delete_records(self, statuses: Collection[Status], limit: int, after: datetime | None) -> PurgedRows:
        if not self.is_distributed("idempotency_record"):
            return super().delete_records(statuses, limit, after)
        return Upkeep.delete_records(self, statuses, limit, after)  # a coordinator can't plan the single statement

    def select_unlocked(
        self,
        rows: QuerySet[Any, _Found],
        limit: int | None = None,
        *,
        condition: Q = Q(),  # noqa: B008 - it is never changed
    ) -> list[_Found]:
        if not self.is_distributed(rows.model._meta.db_table):
            return super().select_unlocked(rows, limit, condition=condition)
        # Find rows in all shards at once, then lock them one shard at a time.
        lock = partial(self._lock_in_shards, rows, condition)
        return self.lock_found(rows.filter(condition), limit, ["pk", "account_id"], lock)

    def _lock_in_shards(self, rows: QuerySet[Any, _Found], condition: Q, found: list[tuple[Any, ...]]) -> list[_Found]:
        """Lock the rows that were found. The statements repeat the conditions, because a row may have changed since."""
        shards: dict[int, list[str]] = defaultdict(list)
        with self.connection.cursor() as cursor:
            accounts = sorted({account for _, account in found})
            cursor.execute(_SHARDS_OF_ACCOUNTS, [rows.model._meta.db_table, accounts])
            for shard, account in cursor.fetchall():
                shards[shard].append(account)
        locked: list[_Found] = []
        for _, accounts in sorted(shards.items()):
            ids = [pk for pk, account in found if account in accounts]
            locked += super().select_unlocked(rows.filter(by_ids(ids, condition), account_id__in=accounts))
        return locked
