"""What a killed process leaves in PgBouncer's pool, and leases while handlers hold all of the pool's sessions.

``python -m tools.crashes --pgbouncer`` runs the matrix there.
"""

import os
import threading
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial

import psycopg
import pytest
from django.db import connections, transaction
from django.test import override_settings

from idempotency.checks import check_databases
from idempotency.store import upkeep_for
from tests.aliases import another_alias
from tests.concurrency.racing import PATIENCE, race
from tests.concurrency.renewing import OUTSIDE, Work
from tests.crash.cells import run_cell
from tests.crash.points import Cell
from tests.harness.pgbouncer import POOL_SIZE, running_pgbouncer

pytestmark = pytest.mark.postgres

#: The settings changed in a session, except those that a pooler sets for each client.
LEFT_BEHIND = """
SELECT name, setting FROM pg_settings WHERE source = 'session' AND name NOT IN ('application_name', 'TimeZone')
"""


def test_a_process_leaves_no_transaction_or_settings_to_the_next_client(pooled):
    cells = [Cell(place, "kill", "begun") for place in ("begin.before", "begin.after", "handler.wrote")]
    cells += [Cell("complete.before", "kill", "inside"), Cell("handler.wrote", "drop", "begun")]
    cells += [Cell(place, "raise", "inside") for place in ("handler.wrote", "release.sent")]
    for cell in cells:
        verdict = run_cell(pooled, cell)
        assert verdict.passed, verdict
    with ExitStack() as stack:  # open transactions give each client a separate session
        url = pooled.pooler.url.partition("?")[0]
        clients = [stack.enter_context(closing(psycopg.connect(url))) for _ in range(POOL_SIZE)]
        assert [client.execute(LEFT_BEHIND).fetchall() for client in clients] == [[]] * POOL_SIZE


HANDLERS = 4


@pytest.mark.failure_79
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("pgbouncer")
@pytest.mark.parametrize("policy", [{}, OUTSIDE], ids=["in a transaction", "outside"])
def test_handlers_that_hold_every_session_of_a_pool_keep_their_leases(policy, monkeypatch):
    everybody_holds_one = threading.Barrier(HANDLERS)

    @contextmanager
    def holding():
        block = transaction.atomic("pooled") if policy else nullcontext()
        with block:
            with connections["pooled"].cursor() as cursor:
                cursor.execute("SELECT 1")
            everybody_holds_one.wait(PATIENCE)
            yield

    work = Work(f"pooled.{'outside' if policy else 'inside'}", **policy)
    url = os.environ["DATABASE_URL"]
    with (
        running_pgbouncer(url, size=HANDLERS) as pooler,
        another_alias(monkeypatch, "pooled", pooler.url),
        another_alias(monkeypatch, "renewals", url),
        override_settings(IDEMPOTENCY={"RENEWAL_DATABASES": {"pooled": "renewals"}}),
    ):
        assert (upkeep_for("pooled").is_pooled(), upkeep_for("default").is_pooled()) == (True, False)
        assert check_databases(None, databases=["pooled"]) == []  # the two aliases are one database
        keys = [f"key-{number}" for number in range(HANDLERS)]
        race([partial(work.do, key, holding) for key in keys])
    assert work.effects == Counter(keys)
