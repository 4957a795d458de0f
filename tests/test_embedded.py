"""The embedded PostgreSQL is private, and stops if and only if its owner ends."""

import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import environ
import psycopg
import pytest

from testproject import embedded
from testproject.embedded import EmbeddedPostgresError, embedded_postgres
from tests.providers import eventually

# The server does not depend on the database of the other tests.
pytestmark = pytest.mark.postgres

#: Starts a server, prints its URL, then runs the test's code.
OWNER = """
import os, sys
from testproject.embedded import embedded_postgres

with embedded_postgres() as url:
    print(url, flush=True)
    {action}
"""

HAVE_A_CHILD_LEAVE_THE_BLOCK = """
    if os.fork() == 0:
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    input()
"""


def directory_of(url):
    return Path(parse_qs(urlsplit(url).query)["host"][0])


def start(action):
    """Start an owner and return it with the URL of its server."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(action=action)],
        cwd=Path(embedded.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def test_a_server_listens_only_on_its_socket_and_is_deleted_with_its_data():
    with embedded_postgres({"max_connections": "17", "application_name": "it's"}) as url:
        directory = directory_of(url)
        assert environ.Env.db_url_config(url)["OPTIONS"] == {"host": str(directory)}
        assert directory.stat().st_mode & 0o077 == 0
        expected = {"listen_addresses": "", "max_connections": "17", "fsync": "on", "application_name": "it's"}
        with psycopg.connect(url) as connection:
            found = connection.execute("SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", [[*expected]])
            assert dict(found.fetchall()) == expected
    assert not directory.exists()


def test_a_child_that_leaves_the_block_leaves_the_server_running():
    process, url = start(HAVE_A_CHILD_LEAVE_THE_BLOCK)
    with process:
        assert process.stdout.readline() == "0\n"
        psycopg.connect(url).close()
        process.communicate("\n")
    assert not directory_of(url).exists()


def test_the_server_of_a_killed_owner_stops():
    process, url = start("input()")
    with process:
        process.kill()
    # The guard process needs a moment to detect its parent's end.
    assert eventually(lambda: not directory_of(url).exists())


def test_a_failed_start_reports_the_cause_and_leaves_nothing(monkeypatch):
    made = embedded._make_directory()
    monkeypatch.setattr(embedded, "_make_directory", lambda: made)
    with pytest.raises(EmbeddedPostgresError, match="no_such_parameter"), embedded_postgres({"no_such_parameter": "1"}):
        pass
    assert not made.exists()
