"""Forks of a process that has loaded Django: ``python -m tests.harness.zygote FD MODULE``.

Loading Django, and even more so Celery, takes about a second; a fork takes milliseconds. So MODULE and its imports are
loaded once, in the zygote, which never opens a connection. Each message on the socket FD contains a process's
specification and its end of a channel. For each, the zygote forks one child, which calls
``MODULE.run(specification, channel)``, and sends back its process id. Each child leads its own session, so that it can
be killed together with the processes it has started. The system reaps the children. They die with the zygote, and the
zygote ends when the other end of its socket is closed.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

from testproject.harness import processes

#: The limit of every wait, in seconds. Correct code never comes near it.
PATIENCE = 120
ROOT = Path(__file__).resolve().parents[2]
MAX_MESSAGE = 65_536
PR_SET_PDEATHSIG = 1


class ImpossibleError(Exception):
    """The harness could not carry out a step. A failure of the test, never a pass."""


#: ``processes.wait_until`` with the harness's limit.
wait_until = partial(processes.wait_until, limit=PATIENCE)


def state_of(pid):
    """The kernel's letter for a process's state; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


class Channel:
    """Lines of JSON over a socket, between a test and a process."""

    def __init__(self, connection):
        connection.settimeout(PATIENCE)
        self._socket = connection
        self._lines = connection.makefile("rb")

    def tell(self, **event):
        self._socket.sendall(json.dumps(event).encode() + b"\n")

    def wait(self):
        """Return the next line from the other side. Raises ``EOFError`` if that is gone."""
        line = self._lines.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    def has_something(self):
        """Whether ``wait`` would return at once."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self):
        self._lines.close()
        self._socket.close()


class Fork:
    """The test's end of one process."""

    def __init__(self, pid, channel):
        self.pid = pid
        self.channel = channel
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = None  # it has died already

    @property
    def alive(self):
        return self._descriptor is not None and not select.select([self._descriptor], [], [], 0)[0]

    def hear(self):
        """Its next event; None if it has died."""
        try:
            event = self.channel.wait()
        except (EOFError, ConnectionResetError):
            return None
        except TimeoutError as error:
            raise ImpossibleError("a process sends no event") from error
        return event

    def expect(self, name):
        """Its next event, which must have this name."""
        event = self.hear()
        if event is None or event["event"] != name:
            raise ImpossibleError(f"a process should have sent {name!r}, but sent {event}")
        return event

    def go(self):
        """Let it continue from the place where it waits."""
        try:
            self.channel.tell(event="go")
        except BrokenPipeError as error:
            raise ImpossibleError("a process that should go on is gone") from error

    def wait_until_stopped(self):
        wait_until(lambda: state_of(self.pid) == "T", "a process stops")

    def wake(self):
        """Wake it from SIGSTOP."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self, *, leftovers=False):
        """Kill it and its children, frozen or not; with ``leftovers``, kill the children even if it is dead."""
        if self.alive or leftovers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.channel.close()
        if self._descriptor is not None:
            if not select.select([self._descriptor], [], [], PATIENCE)[0]:
                raise ImpossibleError(f"process {self.pid} does not end")
            os.close(self._descriptor)
            self._descriptor = None


class Zygote:
    """The test's end of a zygote. Safe to use from several threads."""

    def __init__(self, module, environment, log=None, directory=ROOT):
        """Its forks run ``module``, and write to ``log`` or the test's output. They import from ``directory`` first."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, contextlib.nullcontext() if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.harness.zygote", str(there.fileno()), module],
                cwd=directory,
                env=environment,
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        here.settimeout(PATIENCE)
        self._control = here
        self._lock = threading.Lock()
        if here.recv(16) != b"ready":
            raise ImpossibleError("the zygote did not start")

    def fork(self, **spec):
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [json.dumps(spec).encode()], [theirs.fileno()])
            pid = int(self._control.recv(16))
        return Fork(pid, Channel(ours))

    def close(self):
        self._control.close()
        self._process.wait(PATIENCE)


def main(descriptor, name):
    """The zygote itself."""
    import django

    django.setup()
    module = import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    libc = ctypes.CDLL(None)
    gc.collect()
    gc.freeze()  # objects that are never collected are never copied
    control.send(b"ready")
    zygote = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
        if not message:
            return
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            control.send(str(pid).encode())
            continue
        try:
            os.setsid()
            # A frozen process must not outlive the harness.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            if os.getppid() == zygote:
                module.run(json.loads(message), Channel(socket.socket(fileno=descriptors[0])))
        except (EOFError, BrokenPipeError):
            pass  # the harness has closed the channel
        except BaseException:  # noqa: BLE001 - a fork has no caller that it could be passed to
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
