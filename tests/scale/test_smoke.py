"""The experiments run over a small table and fill their tables. How long anything takes is no test's business."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from django.db import connection

from .__main__ import EXPERIMENTS

pytestmark = [pytest.mark.postgres, pytest.mark.whole_table, pytest.mark.django_db(transaction=True)]

#: Little of everything.
LESS = {
    "growth.PARTS": (1,),
    "growth.BLOCK": 2,
    "growth.ACCOUNTS": 2,
    "admin_pages.TIMES": 1,
    "admin_pages.UNFINISHED": 10,
    "partitions.ROUNDS": 1,
    "purging.ROUNDS": 2,
    "purging.VACUUM_AFTER": 1,
    "purging.CYCLES": 2,
    "purging.IDLE_SECONDS": 0.1,
    "purging.BUSY_ROWS": 1000,
    "purging.PAUSED_PART": 1,
    "claimants.PROCESSES": 1,
    "layouts.BLOCK": 2,
    "layouts.LATER": (0,),
    "layouts.ACCOUNTS": 2,
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_experiment_gives_a_full_table(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if connection.pg_version < 150000:
        # The README's command runs it on PostgreSQL 18.
        pytest.skip("PostgreSQL 14 has no pg_stat_force_next_flush()")
    for name, value in LESS.items():
        monkeypatch.setattr(f"tests.scale.{name}", value)
    monkeypatch.setattr("idempotency.admin.display.ReadOnlyAdmin.list_per_page", 5)
    module = importlib.import_module(f"tests.scale.{experiment}")
    if experiment == "layouts":
        monkeypatch.setattr(module, "LAYOUTS", module.LAYOUTS[-1:])  # the one that differs the most
    if experiment == "partitions":
        monkeypatch.setattr(module, "call_command", lambda *arguments, **options: None)  # other tests need the tables

    tables: list[Any] = module.compare(1000, 1, lambda text: None)

    assert tables
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.headings) for row in table.rows)
