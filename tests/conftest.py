"""What every test may use. It needs Django, and nothing that only some environments have."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
from django.db import connection, connections, transaction
from django.test import TransactionTestCase

# How long an example takes says more of the machine and its neighbours than of the code.
hypothesis.settings.register_profile(
    "tests", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

#: What `migrate` fills and no test changes.
FILLED_BY_MIGRATE = {"django_content_type", "auth_permission"}

LARGE = 200_000  # bytes, of the rows of one table


@pytest.fixture(autouse=True, scope="session")
def _tables_are_emptied_by_delete() -> Iterator[None]:
    """After a test that commits, delete what it wrote.

    Django truncates all tables and then fills some of them again. On PostgreSQL that takes two hundred times as long,
    and was a third of the whole suite.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", _delete_rows)
        yield


def _delete_rows(case: TransactionTestCase) -> None:
    for using in case._databases_names(include_mirrors=False):
        present = connections[using].introspection.django_table_names(only_existing=True)
        tables = sorted(set(present) - FILLED_BY_MIGRATE)
        names = [connections[using].ops.quote_name(table) for table in tables]
        with (
            connections[using].constraint_checks_disabled(),  # MySQL looks after each statement
            transaction.atomic(using=using, durable=True),
            connections[using].cursor() as cursor,
        ):
            if connections[using].vendor == "postgresql":
                # A process that the test has killed may have sent a COMMIT that is still under way.
                cursor.execute(f"LOCK TABLE {', '.join(names)} IN SHARE ROW EXCLUSIVE MODE")
                cursor.execute("SELECT max(pg_relation_size(oid)) FROM pg_class WHERE relname = ANY(%s)", [tables])
                if cursor.fetchone()[0] > LARGE:
                    # What was deleted takes its room still, and what was estimated of it is believed.
                    cursor.execute(f"TRUNCATE {', '.join(names)}")
                    continue
            for name in names:
                cursor.execute(f"DELETE FROM {name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what belongs to another database, instead of reporting it as skipped in every run."""
    here = "postgres" if connection.vendor == "postgresql" else connection.vendor
    elsewhere = {"postgres", "sqlite"} - {here}
    kept = [item for item in items if not any(item.get_closest_marker(vendor) for vendor in elsewhere)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
