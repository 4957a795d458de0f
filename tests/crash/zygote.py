"""The process that others are forks of: ``python -m tests.crash.zygote FD MODULE``.

To load Django, and Celery more so, takes about a second, and a fork takes milliseconds. So what MODULE needs is loaded
once, here, where no connection is ever opened: ``MODULE.load()`` loads what its imports have not. For each message on
the socket FD, a process's specification with its end of a channel, one child is forked, which does
``MODULE.run(specification, channel)``, and its process id is sent back. Children lead a session of their own, so that
each can be killed as one with what it has started. They are reaped by the system; they die with this process, and this
process ends when the other end of the socket is closed.
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

MAX_MESSAGE = 65_536
PR_SET_PDEATHSIG = 1


def main(descriptor: int, name: str) -> None:
    import django

    django.setup()
    from tests.crash.channel import Channel

    module = import_module(name)
    module.load()
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
            # What is frozen and never woken must not outlive the harness.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            if os.getppid() == zygote:
                module.run(json.loads(message), Channel(socket.socket(fileno=descriptors[0])))
        except (EOFError, BrokenPipeError):
            pass  # the harness has let go of it, so nobody wants to know
        except BaseException:  # noqa: BLE001 - there is nobody above a fork that it could be passed to
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
