"""The harness's end of the processes that it starts: where they are forked, how each is told, watched and killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from tests.crash.arena import ImpossibleError, Zygote, wait_until_stopped
from tests.crash.channel import PATIENCE, Channel


def environment(url: str) -> dict[str, str]:
    """What the processes see: the harness's own database, and no broker that somebody has set for another purpose."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
    return {**inherited, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.delivery.settings"}


class Process:
    """One forked process, the leader of a session of its own."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = None  # it has died already

    @property
    def alive(self) -> bool:
        return self._descriptor is not None and not select.select([self._descriptor], [], [], 0)[0]

    def wait_until_dead(self, seconds: float = PATIENCE) -> None:
        if self._descriptor is not None and not select.select([self._descriptor], [], [], seconds)[0]:
            raise ImpossibleError(f"process {self.pid} does not end")

    def wait_until_stopped(self) -> None:
        wait_until_stopped(self.pid)

    def go_on(self) -> None:
        """Wake it from SIGSTOP."""
        os.kill(self.pid, signal.SIGCONT)

    def hear(self) -> dict[str, Any]:
        """What it tells next."""
        try:
            event: dict[str, Any] = self.channel.wait()
        except (EOFError, ConnectionResetError) as error:
            raise ImpossibleError("a process died that nobody had struck") from error
        except TimeoutError as error:
            raise ImpossibleError("a process says nothing") from error
        return event

    def tell(self) -> None:
        self.channel.tell(event="go")

    def end(self) -> None:
        """Kill whatever is left of it and of what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.channel.close()
        if self._descriptor is not None:
            self.wait_until_dead()
            os.close(self._descriptor)
            self._descriptor = None


def zygote_of_processes(url: str, log: Path) -> Zygote[Process]:
    return Zygote("tests.delivery.roles", environment(url), Process, log)


class Keeper:
    """Starts a worker again when it has died, as a process manager does."""

    def __init__(self, zygote: Zygote[Process], specs: list[dict[str, Any]]) -> None:
        self._zygote = zygote
        self._specs = specs
        self._running = [zygote.fork(**spec) for spec in specs]
        self._gone: list[Process] = []
        self.restarts = 0
        self._ended, self._ending = socket.socketpair()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        while not select.select([self._ended], [], [], 0.02)[0]:
            for place, process in enumerate(self._running):
                if not process.alive:
                    self._gone.append(process)
                    self._running[place] = self._zygote.fork(**self._specs[place])
                    self.restarts += 1

    def end(self) -> None:
        self._ending.close()
        self._thread.join()
        self._ended.close()
        # What a killed main process has left running is in its group.
        for process in [*self._running, *self._gone]:
            process.end()
