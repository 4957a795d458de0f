"""The benchmarks run and count right. How long anything takes is no test's business."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from django.db import connection

from .__main__ import EXPERIMENTS

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def tables_of(experiment: str) -> list[Any]:
    """Few operations of an experiment, whose module is imported only when a test needs it."""
    tables: list[Any] = importlib.import_module(f"tests.benchmarks.{experiment}").compare(2, 1, lambda text: None)
    return tables


#: These read the server's statistics, which PostgreSQL 14 can't be told to bring up to date.
NEED_STATISTICS = ("pages", "latency", "requests")


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_experiment_gives_a_full_table(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if connection.pg_version < 150000 and experiment in {EXPERIMENTS[name] for name in NEED_STATISTICS}:
        # The README's command runs it on PostgreSQL 18.
        pytest.skip("PostgreSQL 14 has no pg_stat_force_next_flush()")
    for module in ("requests", "latency"):
        monkeypatch.setattr(f"tests.benchmarks.{module}.BLOCK", 2)
    monkeypatch.setattr("tests.benchmarks.waits.HANDLER_SECONDS", (0.001,))
    monkeypatch.setattr("tests.benchmarks.latency.DELAYS", (0.0, 0.0002))
    monkeypatch.setattr("tests.benchmarks.http.SERVERS", {"gunicorn": "gunicorn"})  # slow views are served by uvicorn
    monkeypatch.setattr("tests.benchmarks.slow_views.LOADS", ((2, 0.001),))
    monkeypatch.setattr("tests.benchmarks.slow_views.POOLS", (2,))

    tables = tables_of(experiment)

    assert tables
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.headings) for row in table.rows)
        assert str(table).startswith("### ")


def test_an_experiment_may_run_after_another_one_on_its_database() -> None:
    for _ in range(2):
        assert tables_of("storm")
