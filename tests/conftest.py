"""Fixtures and hooks for every test. They need only Django, because one environment has nothing else."""

import functools
import os
from contextlib import suppress

import hypothesis
import pytest
from django.db import connection, connections, transaction
from django.test import TransactionTestCase

from testproject.provider import running_providers
from tests.operations import forgetting_operations
from tests.partitions import partition
from tests.plugin import SEQUENCES, SLOW

with suppress(ImportError):
    import idempotency.contrib.ninja  # noqa: F401 - the sample project doesn't use Ninja, so it is not among its apps


def pytest_configure(config):
    # An example's duration depends more on the machine and its load than on the code.
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        # Like the fixture `seed`.
        derandomize=config.getoption("count", None) is None,
    )
    hypothesis.settings.load_profile("tests")


#: Tables that `migrate` fills and no test changes.
FILLED_BY_MIGRATE = {"django_content_type", "auth_permission"}

#: Fixtures that let a test use the database, like the mark ``django_db``.
DATABASE_FIXTURES = {"db", "live_server", "transactional_db"}

CONNECT_TIMEOUT = 60  # seconds

LARGE = 200_000  # bytes, of the rows of one table

#: One round trip for all tables, because a round trip for each costs more than the server's work. The locks come first:
#: a process that the test has killed may have sent a COMMIT that is still in progress. Deleted rows still take space
#: and mislead the planner's estimates, so a large table is truncated. A table without space has had no rows since.
EMPTY_AT_ONCE = """
LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE;
DO $$
DECLARE
    written regclass[];
BEGIN
    written := ARRAY(
        SELECT each FROM unnest('{{{tables}}}'::regclass[]) AS each
        WHERE coalesce((SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree(each)), pg_relation_size(each)) > 0
    );
    IF EXISTS (SELECT FROM unnest(written) AS each WHERE pg_relation_size(each) > {large}) THEN
        TRUNCATE {tables};
    ELSE
        FOR place IN 1 .. cardinality(written) LOOP
            EXECUTE 'DELETE FROM ' || written[place];
        END LOOP;
    END IF;
END $$
"""


@pytest.fixture(autouse=True, scope="session")
def _tables_are_emptied_by_delete():
    """After a test that commits, delete its rows, and keep its connections.

    Django truncates all tables and then fills some of them again. On PostgreSQL that takes two hundred times as long,
    and was a third of the whole suite's time. It also closes the connections, and a new session reads the catalogue for
    its first statements: another quarter. The package must leave nothing in a session, so the next test can reuse it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", _delete_rows)
        patch.setattr(TransactionTestCase, "_should_reload_connections", lambda case: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _connections_may_take_long():
    """The project's connect timeout suits one request. In tests, hundreds of threads may connect at once."""
    options = connections.settings["default"].get("OPTIONS", {})
    with pytest.MonkeyPatch.context() as patch:
        if "connect_timeout" in options:
            patch.setitem(options, "connect_timeout", CONNECT_TIMEOUT)
        yield


@pytest.fixture(autouse=True)
def _names_of_operations_are_free_again():
    """Forget each test's operations named ``tests.…``, so that another test may declare them differently."""
    with forgetting_operations("tests."):
        yield


def _delete_rows(case):
    for using in case._databases_names(include_mirrors=False):
        database = connections[using]
        tables = _tables(using, database.settings_dict["NAME"])
        with (
            database.constraint_checks_disabled(),  # MySQL checks after each statement
            transaction.atomic(using=using, durable=True),
            database.cursor() as cursor,
        ):
            if database.vendor == "postgresql":
                names = ", ".join(tables)
                cursor.execute(EMPTY_AT_ONCE.format(tables=names, large=LARGE))
                continue
            for table in tables:
                cursor.execute(f"DELETE FROM {table}")


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):
    """With ``TEST_PARTITIONS``, the tests run on partitioned tables."""
    if partitions := os.environ.get("TEST_PARTITIONS"):
        with django_db_blocker.unblock():
            partition(int(partitions))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Close a failed test's connections, which may be in the middle of a transaction or a query."""
    report = yield
    if report.failed:
        for database in connections.all(initialized_only=True):
            _abandon(database)
    return report


def _abandon(database):
    """Close the connection and forget its atomic blocks, except the one that a TestCase ends itself."""
    of_the_test = bool(database.atomic_blocks and database.atomic_blocks[0]._from_testcase)
    del database.atomic_blocks[of_the_test:], database.savepoint_ids[:]
    database.in_atomic_block = of_the_test
    database.close()


@functools.cache
def _tables(using, database):
    """The quoted names of the tables that tests write to. Migrations create them, so a session can cache them."""
    present = connections[using].introspection.django_table_names(only_existing=True)
    return [connections[using].ops.quote_name(table) for table in sorted(set(present) - FILLED_BY_MIGRATE)]


@pytest.fixture(scope="session")
def count(pytestconfig):
    """The number of cases for a test that draws its cases, or None for its default."""
    return pytestconfig.getoption("count")


@pytest.fixture(scope="session")
def seed(pytestconfig, count):
    """The seed for drawing cases. Without ``--count``, each run draws the same cases, so no run fails by chance.

    With ``--count``, each run draws other cases. pytest prints the seed, and ``--randomly-seed=N`` repeats them.
    """
    return 0 if count is None else int(pytestconfig.getoption("randomly_seed", 0))


@pytest.fixture(scope="session")
def providers(tmp_path_factory):
    """A provider that deduplicates by key (True), and one that pays for each call. Tests use distinct labels."""
    with running_providers(tmp_path_factory.mktemp("providers")) as running:
        yield running


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(config, items):
    """Deselect the tests of another database, instead of reporting them as skipped in every run.

    A test without a database fixture can't use the database, so it is marked ``once``. The slow ones are marked, too.
    """
    here = {"postgresql": "postgres", "mysql": "mariadb"}.get(connection.vendor, connection.vendor)
    elsewhere = {"postgres", "sqlite", "mariadb"} - {here} | {f"except_{here}"}
    if os.environ.get("TEST_PARTITIONS"):
        elsewhere.add("whole_table")
    kept, left_out = [], []
    for item in items:
        (left_out if any(item.get_closest_marker(vendor) for vendor in elsewhere) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    slow = SLOW | SEQUENCES if here == "sqlite" else SLOW
    for item in items:
        if not _reaches_the_database(item) and item.get_closest_marker(here) is None:
            item.add_marker(pytest.mark.once)
        if not slow.isdisjoint({item.path.parent.name, item.path.stem}):
            item.add_marker(pytest.mark.slow)


def _reaches_the_database(item):
    if item.get_closest_marker("django_db") is not None or not DATABASE_FIXTURES.isdisjoint(item.fixturenames):
        return True
    case = getattr(item, "cls", None)
    return case is not None and issubclass(case, TransactionTestCase)
