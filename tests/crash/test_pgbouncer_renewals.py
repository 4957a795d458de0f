"""Leases behind a PgBouncer whose sessions the handlers hold themselves, and beside one that is stopped."""

import os
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
from django.db import connections, transaction
from django.test import override_settings

from idempotency import claim
from idempotency.checks import check_databases
from idempotency.store import store_for
from tests.aliases import another_alias
from tests.concurrency.racing import PATIENCE, elsewhere, race
from tests.concurrency.renewing import LEASE, OUTSIDE, Work, wait_for_a_renewal
from tests.harness.pgbouncer import running_pgbouncer

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("pgbouncer")]

HANDLERS = 4


@pytest.mark.failure_79
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
        assert (store_for("pooled").is_pooled(), store_for("default").is_pooled()) == (True, False)
        assert check_databases(None, databases=["pooled"]) == []  # the two aliases are one database
        keys = [f"key-{number}" for number in range(HANDLERS)]
        race([partial(work.do, key, holding) for key in keys])
    assert work.effects == Counter(keys)


@pytest.mark.failure_78
def test_a_stopped_pooler_takes_no_lease_in_a_database_behind_another(monkeypatch):
    work = Work("tests.beside_a_stop", **OUTSIDE)
    with (
        running_pgbouncer(os.environ["DATABASE_URL"]) as pooler,
        another_alias(monkeypatch, "pooled", pooler.url),
        claim("pooled.stopped", account_id="1", key="k", lease=LEASE, heartbeat=60 * LEASE) as run,
    ):
        wait_for_a_renewal("k")
        with pooler.stopped():
            elsewhere(partial(work.do, "healthy"))
        run.result = 1
    assert work.effects == {"healthy": 1}
