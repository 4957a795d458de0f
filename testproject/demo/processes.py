"""Processes that the demo starts, kills and starts again, and that never outlive it.

Each leads a session, and so a process group, of its own: a Ctrl-C in the terminal reaches the demo, which then decides,
and what a process has forked ends with it. A guard, a process of its own, knows all of them. It sees the demo's end of
a pipe close, by whatever signal the demo ended, and kills what is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

START_LIMIT = 60.0  # seconds; a loaded machine may take several to import Django
STOP_LIMIT = 10.0
LOG_END = 10_000  # bytes, enough for a traceback

# Reads until the demo's end of the pipe is closed.
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

# Tells the guard of itself before it becomes the process that is meant, so that there is no moment between. Its
# standard input is the demo's end of the pipe, which must not stay open in it.
BIRTH_SCRIPT = 'echo "born $$" >&0; exec "$@" </dev/null'


class ProcessError(RuntimeError):
    """A process did not start; the message ends with its log."""


class Guard:
    """Kills what is left of the processes that were started under it, when the demo is gone."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def forget(self, pid: int) -> None:
        """Called when the process has been waited for, and somebody else may get its id."""
        os.write(self.pipe, f"gone {pid}\n".encode("ascii"))


@contextmanager
def guarded() -> Iterator[Guard]:
    """A guard, until the block has ended or the demo is gone."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", GUARD_SCRIPT, "demo-guard"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    try:
        yield Guard(process.stdin.fileno())
    finally:
        process.communicate()


class Daemon:
    """One process, which can be started more than once. ``kills`` says how often it was killed on purpose."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        guard: Guard,
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        is_ready: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name
        self.kills = 0
        self._command = command
        self._guard = guard
        self._environment = {**os.environ, **(environment or {})}
        self._is_ready = is_ready
        self._log: BinaryIO = (directory / f"{name}.log").open("a+b")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again. Where it is known when it is ready, wait until then.

        :raises ProcessError: it ended, or was not ready in time.
        """
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", BIRTH_SCRIPT, self.name, *self._command],
            env=self._environment,
            stdin=self._guard.pipe,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_LIMIT
        while self._is_ready is not None and not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ProcessError(f"{self.name} did not start. Its log ends with:\n{self.log_tail()}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether it ended though nobody stopped it."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL it and all that it forked, and wait until it is gone."""
        self.kills += 1
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end; at once if it will not go by itself."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if how is signal.SIGKILL and process.poll() is None:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)  # its children are its own to end
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind; the group's id is taken while that lives
        self._guard.forget(process.pid)

    def log_tail(self, lines: int = 20) -> str:
        # Not by seek and read: the process writes where this descriptor stands.
        written = os.fstat(self._log.fileno()).st_size
        end = os.pread(self._log.fileno(), LOG_END, max(0, written - LOG_END))
        return "\n".join(end.decode(errors="replace").splitlines()[-lines:])

    @contextmanager
    def running(self) -> Iterator[None]:
        """It runs, killed or not, until the end of the block."""
        try:
            self.start()
            yield
        finally:
            self.stop()
            self._log.close()
