"""What a killed process leaves behind in PgBouncer's pool.

``python -m tools.crashes --pgbouncer`` runs the matrix there.
"""

from contextlib import ExitStack, closing

import psycopg
import pytest

from tests.crash.cells import run_cell, running
from tests.crash.points import Cell
from tests.harness.pgbouncer import POOL_SIZE

pytestmark = pytest.mark.postgres

#: What was set in a session, but for what a pooler sets to each client's own.
LEFT_BEHIND = """
SELECT name, setting FROM pg_settings WHERE source = 'session' AND name NOT IN ('application_name', 'TimeZone')
"""


def left_behind(pooler):
    """What the next client would find in each session of the pool. Open transactions hold the sessions apart."""
    with ExitStack() as stack:
        url = pooler.url.partition("?")[0]
        clients = [stack.enter_context(closing(psycopg.connect(url))) for _ in range(POOL_SIZE)]
        return [client.execute(LEFT_BEHIND).fetchall() for client in clients]


def test_a_killed_process_leaves_neither_its_transaction_nor_its_settings_to_the_next_client(pooled):
    with running(pooled, Cell("complete.before", "kill", "inside")) as run:
        observer = run.observer
        victim = run.fork(arms=[["complete.before", "stop"]])
        victim.expect("reached")
        open_ones = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND state = 'idle in transaction'"
        ((session,),) = observer.query(open_ones, run.operation)
        victim.end()
        observer.wait_until_gone()

        assert not observer.query("SELECT 1 FROM pg_stat_activity WHERE pid = %s", session)
        assert observer.writes(run.key) == []
        run.end_lease()
        run.converge()
        run.judge()
        assert (run.verdict.problems, observer.writes(run.key)) == ([], ["attempt 2"])
    for point in ("handler.wrote", "release.sent"):
        assert run_cell(pooled, Cell(point, "raise", "inside")).passed
    assert left_behind(pooled.pooler) == [[]] * POOL_SIZE
