"""Provides the session's database, before pytest-django reads the settings, and the marks of FAILURES.md.

In CI, a test that skips itself fails, unless its reason is in ``ALLOWED_SKIPS``.

``DATABASE_URL`` names the database. Without it, ``--database`` chooses: the session starts an embedded PostgreSQL or a
MariaDB server, or creates a SQLite file.
The processes of pytest-xdist and of the tests inherit it through the environment.
"""

import os
import re
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.results import COMMAND, command, note

#: Folders and files of tests that are marked ``slow``, which other parts of `.ci/run` run than the README's command.
SLOW = {
    *("browser", "conformance", "crash", "delivery", "model", "test_benchmarks", "test_cut_off", "test_embedded"),
    *("test_moving", "test_runs", "test_tutorial"),
}
#: Sequences of calls, which are slow on a second database: the README's test command makes them on PostgreSQL.
SEQUENCES = {"orders", "test_stateful"}

#: Scenarios and failures. Each entry has a mark, which tests have and ``-m`` selects.
FAILURES = Path(__file__).with_name("FAILURES.md")

#: How the reasons begin for which a test may skip itself in CI. Anything else that is missing must be installed.
ALLOWED_SKIPS = (
    "BEGIN commits the open transaction",  # MariaDB
    "Django refuses async views with ATOMIC_REQUESTS",
    "needs root, a loop device and mkfs.ext4",
    "this Django Ninja has no streams",  # the oldest one
)

VENDORS = {"postgres": ("postgres", "postgresql", "pgsql", "psql"), "sqlite": ("sqlite",), "mariadb": ("mysql",)}


def pytest_addoption(parser):
    parser.addoption(
        "--database",
        choices=sorted(VENDORS),
        help="The database of the tests if DATABASE_URL is not set (default: postgres, embedded).",
    )
    parser.addoption(
        "--count",
        type=int,
        help="The number of cases for tests that draw them (default: few; 0: every order of two actors' steps).",
    )


def marks():
    """The marks of the listed scenarios and failures, ``scenario_20`` or ``failure_53``, each with its text."""
    found = {}
    for part in re.split(r"^## ", FAILURES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        kind = part.partition("\n")[0].lower().removesuffix("s")
        found.update({f"{kind}_{number}": text for number, text in re.findall(r"^(\d+)\. (.+)$", part, re.MULTILINE)})
    return found


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[COMMAND] = command()
    for name, text in marks().items():
        config.addinivalue_line("markers", f"{name}: {text}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """After the tests are shuffled, move the slow ones to the front: a slow last test would leave processes idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return judged((yield))


def judged(report):
    """Turn a skipped test or module into a failed one in CI, unless its reason is allowed."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"Skipped in CI: {reason}. Install what is missing, or allow it in tests/plugin.py."
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Save the coverage of a pytest-xdist process, because a process that needs ten seconds to exit is killed."""
    coverage = sys.modules.get("coverage") if "PYTEST_XDIST_WORKER" in os.environ else None
    if coverage and (measured := coverage.Coverage.current()):
        measured.save()


#: The folders of the tests that depend on the database.
ON_A_DATABASE = {"tests/concurrency", "tests/database", "tests/http"}


def pytest_terminal_summary(terminalreporter):
    """Record the run of a suite on a database, for the table of what is tested."""
    passed, failed, skipped = (terminalreporter.stats.get(how, []) for how in ("passed", "failed", "skipped"))
    failed = [*failed, *terminalreporter.stats.get("error", [])]
    folders = {"/".join(report.nodeid.split("/")[:2]) for report in passed}
    if "RESULTS" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ or not folders >= ON_A_DATABASE:
        return
    from tests.harness.world import server_of

    server = server_of(os.environ["DATABASE_URL"])
    if partitions := os.environ.get("TEST_PARTITIONS"):
        server += f", {partitions} partitions"
    problems = {"failed": ", ".join(report.nodeid for report in failed)[:300]} if failed else {}
    note("tests", server=server, passed=len(passed), skipped=len(skipped), violations=len(failed), **problems)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config):
    """A wrapper runs before every other hook of this name, including pytest-django's."""
    _provide_database(early_config)
    return (yield)


def _provide_database(config):
    asked_for = config.known_args_namespace.database
    if url := os.environ.get("DATABASE_URL"):
        scheme = url.partition(":")[0]
        if asked_for and scheme not in VENDORS[asked_for]:
            raise pytest.UsageError(f"--database={asked_for}, but DATABASE_URL names a {scheme} database.")
        return

    resources = ExitStack()
    config.add_cleanup(resources.close)
    if asked_for == "sqlite":
        directory = resources.enter_context(tempfile.TemporaryDirectory(prefix="tests-sqlite-"))
        url = f"sqlite:///{Path(directory, 'db.sqlite3')}"
    elif asked_for == "mariadb":
        from tests.harness.mariadb import running_mariadb

        url = resources.enter_context(running_mariadb())
    else:
        # Imported only here, so that the core's tests run without the sample project's packages.
        from testproject.embedded import EmbeddedPostgresError, embedded_postgres

        try:
            url = resources.enter_context(embedded_postgres())
        except EmbeddedPostgresError as error:
            raise pytest.UsageError(f"{error}\nOr run the tests with --database=sqlite.") from error
    os.environ["DATABASE_URL"] = url
    resources.callback(os.environ.pop, "DATABASE_URL", None)
