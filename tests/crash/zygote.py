"""The process that every worker is a fork of: ``python -m tests.crash.zygote FD``.

Django takes most of a second to load and a fork takes milliseconds, so it is loaded once, here, where no connection is
ever opened. For each message on the socket FD, a worker's specification with the worker's end of its channel, one
child is forked and its process id is sent back. Children are reaped by the system; they die with this process, and
this process ends when the other end of the socket is closed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback

MAX_MESSAGE = 65_536
PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    import django

    django.setup()
    from django.test import Client  # noqa: F401 - loaded once, not by every child
    from django.urls import get_resolver

    from tests.crash.channel import Channel
    from tests.crash.worker import Worker

    get_resolver().url_patterns  # noqa: B018 - loads the URLconf
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    libc = ctypes.CDLL(None)
    gc.collect()
    gc.freeze()  # what is never collected is never copied
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
            # A frozen worker that nobody wakes must not outlive the harness.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            if os.getppid() == zygote:
                Worker(Channel(socket.socket(fileno=descriptors[0])), json.loads(message)).run()
        except (EOFError, BrokenPipeError):
            pass  # the cell has gone, so nobody wants to know
        except BaseException:  # noqa: BLE001 - there is nobody above a fork that it could be passed to
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
