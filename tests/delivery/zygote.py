"""The process that every worker, relay and producer is a fork of: ``python -m tests.delivery.zygote FD``.

Loading Django and Celery takes more than a second and a fork takes milliseconds, so both are loaded once, here, where
no connection is ever opened. For each message on the socket FD, a process's specification with its end of a channel,
one child is forked and its process id is sent back. Children lead a session of their own, so that a worker and the
children of its pool can be killed as one. They die with this process, and this process ends when the other end of the
socket is closed.
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
from importlib import import_module

#: What every child would load by itself.
LOADED_ONCE = (
    "celery.apps.worker",
    "celery.concurrency.prefork",
    "celery.worker.consumer",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
)
MAX_MESSAGE = 65_536
PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    import django

    django.setup()
    for module in LOADED_ONCE:
        import_module(module)
    from tests.crash.channel import Channel
    from tests.delivery.roles import ROLES

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
            os.setsid()
            # What is stopped and never woken must not outlive the harness.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            if os.getppid() == zygote:
                spec = json.loads(message)
                ROLES[spec["role"]](spec, Channel(socket.socket(fileno=descriptors[0])))
        except (EOFError, BrokenPipeError):
            pass  # the harness has let go of it
        except BaseException:  # noqa: BLE001 - there is nobody above a fork that it could be passed to
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
