"""``python -m tests.scale.citus … lost``: what a crash of the coordinator tears apart, by what Citus knows of a table.

Threads write a row to a distributed table, as a record is one, and a row to a table of the coordinator, in one
transaction. The coordinator is killed meanwhile and started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from uuid import uuid4

import psycopg

from testproject.embedded import UNPRIVILEGED_USER
from tests.harness.citus import Cluster, host_of
from tests.harness.world import say

THREADS = 12
#: Seconds of load before a crash. It shall hit any moment of a COMMIT, so nothing waits for one.
LOAD = 0.5

SETUP = [
    "CREATE TABLE record (key text, account text, PRIMARY KEY (account, key))",
    "SELECT create_distributed_table('record', 'account')",
    "CREATE TABLE unknown (key text PRIMARY KEY)",
    "CREATE TABLE known (key text PRIMARY KEY)",
    "SELECT citus_add_local_table_to_metadata('known')",
]
IN_DOUBT = """
SELECT sum(CASE WHEN success THEN result::integer ELSE 1 END)
FROM run_command_on_workers('SELECT count(*) FROM pg_prepared_xacts')
"""


def write(url: str, table: str, account: str) -> None:
    """Until the coordinator is gone."""
    with contextlib.suppress(psycopg.Error), psycopg.connect(url) as connection:
        while True:
            key = str(uuid4())
            connection.execute("INSERT INTO record VALUES (%s, %s)", (key, account))
            connection.execute(f"INSERT INTO {table} VALUES (%s)", (key,))
            connection.commit()


def kill_and_restart(binaries: Path, data: Path) -> None:
    lock = data / "postmaster.pid"
    postmaster = int(lock.read_text().split()[0])
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(postmaster)], capture_output=True, text=True, check=True
    )
    for process in [postmaster, *map(int, children.stdout.split())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    lock.unlink()
    user = UNPRIVILEGED_USER if os.geteuid() == 0 else None
    command = [binaries / "pg_ctl", "-D", data, "-l", data.parent / "server.log", "-w", "-s", "start"]
    while subprocess.run(command, user=user, stderr=subprocess.DEVNULL, check=False).returncode:
        time.sleep(0.2)  # the killed processes are still going


def count_torn(url: str, table: str) -> tuple[int, int]:
    """Rows of the distributed table without their row here, and the other way round, when nothing is in doubt."""
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            connection.execute("SELECT recover_prepared_transactions()")
            if connection.execute(IN_DOUBT).fetchall() == [(0,)]:
                break
            time.sleep(0.2)
        records, rows = (
            {key for (key,) in connection.execute(f"SELECT key FROM {name}")} for name in ("record", table)
        )
        connection.execute(f"TRUNCATE record, {table}")
    return len(records - rows), len(rows - records)


def run(cluster: Cluster, crashes: int) -> int:
    with psycopg.connect(cluster.coordinator, autocommit=True) as connection:
        connection.execute("CREATE DATABASE torn")
    url = cluster.spread(cluster.url_of("torn"))
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in SETUP:
            connection.execute(statement)
    torn = {}
    for table in ("unknown", "known"):
        lost = extra = 0
        for _ in range(crashes):
            threads = [threading.Thread(target=write, args=(url, table, str(number))) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            time.sleep(LOAD)
            kill_and_restart(cluster.binaries, Path(host_of(url), "data"))
            for thread in threads:
                thread.join()
            here, there = count_torn(url, table)
            lost, extra = lost + here, extra + there
        torn[table] = lost + extra
        say(
            f"A table that is {table} to Citus, {crashes} crashes: {lost} rows lost of committed records, {extra} extra"
        )
    return 0 if torn["unknown"] > 0 == torn["known"] else 1
