"""What a COMMIT on PostgreSQL waits for, and the standbys that it doesn't wait for."""

from __future__ import annotations

from ..store import Replication, Store

# A role without the rights of pg_monitor gets NULL for the state of each standby, and so counts none. A subscriber or
# another reader of changes is no standby: its slot is a logical one.
_REPLICATION = """
SELECT current_setting('synchronous_commit'), current_setting('synchronous_standby_names') <> '', (
    SELECT count(*) FROM pg_stat_replication AS standby
    WHERE standby.state IN ('catchup', 'streaming') AND standby.sync_state = 'async' AND NOT EXISTS (
        SELECT FROM pg_replication_slots AS slot WHERE slot.active_pid = standby.pid AND slot.slot_type = 'logical'
    )
)
"""


class Replicated(Store):
    def replication(self) -> Replication:
        with self.connection.cursor() as cursor:
            cursor.execute(_REPLICATION)
            return Replication(*cursor.fetchone())
