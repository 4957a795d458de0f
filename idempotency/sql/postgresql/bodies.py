"""The purge of bodies on PostgreSQL: one statement takes a batch."""

from __future__ import annotations

import json
from datetime import datetime

from django.utils.dateparse import parse_datetime

from ...outcome import BODY_GONE
from ..store import DeletedBatch, Part
from .citus import Citus, Shard

# The same shape as the statement that deletes free records, for the same reasons. Only a completed record is changed,
# because the steps of any other are still needed.
_DELETE_BODIES = """
WITH due AS MATERIALIZED (
    SELECT ctid, id, body_expires_at
    FROM {part.records}
    WHERE body_expires_at <= {now} AND body_expires_at >= %(after)s AND status = 'completed'
    ORDER BY body_expires_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    UPDATE {part.records} AS record
    SET response_body = %(gone)s::json, response_headers = '[]', error = NULL, body_expires_at = NULL
    WHERE record.ctid = ANY(ARRAY(SELECT ctid FROM due))
        AND (record.body_expires_at <= {now} AND record.status = 'completed') IS TRUE
    RETURNING record.id, record.account_id
), steps AS (
    DELETE FROM {part.steps} AS step
    USING deleted
    WHERE step.account_id = deleted.account_id AND step.record_id = deleted.id
)
SELECT json_build_array(
    (SELECT count(*) FROM deleted), (SELECT count(*) FROM due), (SELECT max(body_expires_at) FROM due)
)::text
"""


class Bodies(Citus):
    def delete_bodies(self, part: Part, limit: int, after: datetime | None) -> DeletedBatch:
        parameters = {"after": "-infinity" if after is None else after, "gone": BODY_GONE, "limit": limit}
        if isinstance(part, Shard):
            answer = self.run_in_shard(part, lambda now: _DELETE_BODIES.format(part=part, now=now), parameters)
        else:
            with self.connection.cursor() as cursor:
                cursor.execute(_DELETE_BODIES.format(part=part, now="statement_timestamp()"), parameters)
                ((answer,),) = cursor.fetchall()
        deleted, found, reached = json.loads(answer)
        return DeletedBatch(deleted, found < limit, reached and parse_datetime(reached))
