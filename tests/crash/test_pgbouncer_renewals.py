"""Leases behind a PgBouncer whose sessions the handlers hold themselves, and beside one that is stopped."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction
from django.test import override_settings

from idempotency import REEXECUTE, Operation, claim, require_claim
from idempotency.checks import check_databases
from idempotency.exceptions import InProgressError
from idempotency.models import IdempotencyRecord
from idempotency.store import store_for
from tests.aliases import another_alias
from tests.concurrency.racing import PATIENCE, elsewhere, race
from tests.harness.pgbouncer import running_pgbouncer
from tests.providers import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("pgbouncer")]

HANDLERS = 4
#: A third of it passes before the first renewal, and all of it if that never comes.
LEASE = timedelta(seconds=6)
OUTSIDE: dict[str, Any] = {"transaction": False, "recovery": REEXECUTE}


def lease_end(key: str) -> datetime:
    end = IdempotencyRecord.objects.using("default").get(idempotency_key=key).lease_expires_at
    assert end is not None
    return end


def wait_for_a_renewal(key: str) -> None:
    """Wait until the lease has been renewed, or is lost."""
    first_end = lease_end(key)
    assert eventually(lambda: lease_end(key) > first_end or require_claim().lost)


class Work:
    """An operation with an effect outside, which takes longer than its lease. Meanwhile its client retries."""

    def __init__(self, name: str, **policy: Any) -> None:
        self.effects: Counter[str] = Counter()
        operation = Operation(name, lease=LEASE, heartbeat=60 * LEASE, **policy)
        self._claim = partial(claim, operation, account_id="1")

    def do(self, key: str, during: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        with self._claim(key=key) as run:
            self.effects[key] += 1
            with during():
                wait_for_a_renewal(key)
                with pytest.raises(InProgressError):
                    elsewhere(partial(self._retry, key))
            run.result = 1

    def _retry(self, key: str) -> None:
        # By another way than a pool without a free session.
        connections["pooled"] = connections["default"].copy(alias="pooled")
        with self._claim(key=key) as run:
            self.effects[key] += 1
            run.result = 2


@pytest.mark.failure_79
@pytest.mark.parametrize("policy", [{}, OUTSIDE], ids=["in a transaction", "outside"])
def test_handlers_that_hold_every_session_of_a_pool_keep_their_leases(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody_holds_one = threading.Barrier(HANDLERS)

    @contextmanager
    def holding() -> Iterator[None]:
        block: Any = transaction.atomic("pooled") if policy else nullcontext()
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
def test_a_stopped_pooler_takes_no_lease_in_a_database_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
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
