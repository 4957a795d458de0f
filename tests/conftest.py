"""What every test may use. It needs Django, and nothing that only some environments have."""

from __future__ import annotations

import hypothesis
import pytest
from django.db import connection

# How long an example takes says more of the machine and its neighbours than of the code.
hypothesis.settings.register_profile(
    "tests", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what belongs to another database, instead of reporting it as skipped in every run."""
    here = "postgres" if connection.vendor == "postgresql" else connection.vendor
    elsewhere = {"postgres", "sqlite"} - {here}
    kept = [item for item in items if not any(item.get_closest_marker(vendor) for vendor in elsewhere)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
