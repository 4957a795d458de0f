"""The benchmarks run and count correctly. No test checks a duration."""

import importlib

import pytest

from tools.benchmarks.__main__ import EXPERIMENTS


@pytest.fixture(autouse=True)
def _garbage_of_the_tests_stays(monkeypatch):
    """Collecting garbage before each block takes longer than all blocks."""
    monkeypatch.setattr("tools.benchmarks.instruments.gc.collect", lambda: 0)


pytestmark = [pytest.mark.postgres, pytest.mark.whole_table, pytest.mark.django_db(transaction=True)]


def tables_of(experiment, number=2):
    """Run an experiment with few operations. Its module is imported only when a test needs it."""
    return importlib.import_module(f"tools.benchmarks.{experiment}").compare(number, 1, lambda text: None)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_gives_a_full_table(experiment, monkeypatch):
    for name, value in {
        "requests.BLOCK": 2,
        "latency.BLOCK": 2,
        "latency.DELAYS": (0.0, 0.0002),
        "storm.DUPLICATES": 5,
        "purge.ROUNDS": 1,
    }.items():
        monkeypatch.setattr(f"tools.benchmarks.{name}", value)

    tables = tables_of(experiment, {"purge": 1000, "upkeep": 5000}.get(experiment, 2))

    assert tables
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.headings) for row in table.rows)
        assert str(table).startswith("### ")


def test_a_variant_that_protects_nothing_ends_an_experiment(monkeypatch):
    """A fast variant must also be correct."""
    from tools.benchmarks import requests, views

    bare = requests.Variant("bare", views.BareView)
    monkeypatch.setattr(requests, "BLOCK", 2)
    monkeypatch.setattr(requests, "REPLAYS", (requests.BASELINE, bare))
    with pytest.raises(AssertionError, match="effects instead of 0"):
        tables_of("requests")
