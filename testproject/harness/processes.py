"""Processes that can be started, killed and restarted, and that never outlive their owner.

Each process leads its own session, so that a Ctrl-C in the terminal only reaches the owner, and the forks of a process
are killed with it. Each owner has a guard process, which knows all of them. When the owner ends, by any signal, the
guard's pipe closes, and the guard kills the remaining processes.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

START_LIMIT = 60.0  # seconds; a loaded machine may take several to import Django
STOP_LIMIT = 30.0

#: Seconds between two polls of another process.
POLL_INTERVAL = 0.02

# A Unix socket's path has at most 104 bytes on macOS and 108 on Linux, including the terminating NUL and the socket's
# name.
DIRECTORY_LIMIT = 80

# Reads until the owner's end of the pipe closes.
GUARD_SCRIPT = """
alive=""
while read -r word pid; do
    case "$word" in
    born) alive="$alive $pid" ;;
    gone) rest=""; for other in $alive; do [ "$other" = "$pid" ] || rest="$rest $other"; done; alive="$rest" ;;
    esac
done
for pid in $alive; do kill -KILL "-$pid" 2>/dev/null; done
"""

# Reports its id to the guard before it becomes the intended program, so that the guard always knows every process. Its
# standard input is the owner's end of the pipe, which must not stay open in the program.
BIRTH_SCRIPT = 'echo "born $$" >&0; exec "$@" </dev/null'


class ProcessError(RuntimeError):
    """A process did not start. The message ends with its log."""


def wait_until(condition: Callable[[], Any], what: str, limit: float) -> Any:
    """Poll a condition that no event reports, for example the state of another process, until it is true.

    :param what: the condition's name, for the TimeoutError after ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit:g} s")
        time.sleep(POLL_INTERVAL)
    return found


@contextmanager
def short_directory(prefix: str) -> Iterator[Path]:
    """A temporary directory whose path leaves room for the name of a Unix socket."""
    parent = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent if len(os.fsencode(parent)) + len(prefix) + 10 < DIRECTORY_LIMIT else "/tmp"
    ) as directory:
        yield Path(directory)


def free_port() -> int:
    """A free port on the loopback interface. On other systems than Linux, another process may take it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        if sys.platform == "linux":
            # While this process lives, the kernel assigns the port to no process that requests any free port. A server
            # can still bind it, because no socket listens, and servers set SO_REUSEADDR.
            probe.detach()
        return port


def answers(address: Path | tuple[str, int], question: bytes = b"", answer: bytes = b"") -> bool:
    """Whether a server listens on a Unix socket or a port, and gives the expected answer to a question."""
    try:
        with socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET) as connection:
            connection.settimeout(10)
            connection.connect(str(address) if isinstance(address, Path) else address)
            connection.sendall(question)
            return not question or connection.recv(64).startswith(answer)
    except OSError:
        return False


@cache
def _guard(owner: int) -> int:
    """The owner's end of the pipe to its guard, which the first call starts."""
    process = subprocess.Popen(["/bin/sh", "-c", GUARD_SCRIPT, "guard"], stdin=subprocess.PIPE, start_new_session=True)
    pipe = process.stdin
    assert pipe is not None

    def end() -> None:
        if os.getpid() == owner:  # a fork of the owner must not end the guard
            pipe.close()
            process.wait()

    atexit.register(end)
    return pipe.fileno()


class Daemon:
    """A program that can be started more than once and writes to one log."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """The log is in ``directory``. ``environment`` is added to the owner's variables."""
        self.name = name
        self.directory = directory
        self.log = directory / f"{name}.log"
        self.command = command
        self.environment = environment or {}
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or restart it, and wait until it is ready.

        :raises ProcessError: it ended, or was not ready in time.
        """
        self.stop()  # stop an earlier run
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", BIRTH_SCRIPT, self.name, *self.command],
                env={**os.environ, **self.environment},
                stdin=_guard(os.getpid()),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(lambda: not self.alive or self._is_ready(), self.name, START_LIMIT)
        except TimeoutError:
            self.kill()
        if not self.alive:
            self.stop()
            raise ProcessError(f"{self.name} did not start. Its log ends with:\n{self.log_tail()}")

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill it and all its forks with SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL, of_all=True)

    def stop(self) -> None:
        """Send SIGTERM, and kill it if it does not exit in time."""
        self._end(signal.SIGTERM, of_all=False)  # the program ends its children itself

    def _end(self, how: signal.Signals, *, of_all: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with suppress(ProcessLookupError):
                (os.killpg if of_all else os.kill)(process.pid, how)
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # kill remaining children, whose group keeps the id
        os.write(_guard(os.getpid()), f"gone {process.pid}\n".encode("ascii"))  # another process may get this id

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
