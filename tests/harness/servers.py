"""Finds the programs of servers, skips tests whose server is missing, and runs servers in a thread."""

import os
import shutil
import sys
import threading
from contextlib import contextmanager

import pytest

from testproject.harness.redis import RedisMissingError, find_redis

#: Servers are often installed in directories that only root has on the PATH.
PLACES = os.pathsep.join(["/usr/lib/rabbitmq/bin", os.environ.get("PATH", ""), "/usr/sbin", "/usr/libexec"])


class ProgramMissingError(RuntimeError):
    """A program is not installed. The message explains how to install it."""


def find_program(name, package):
    """:raises ProgramMissingError: it is not installed."""
    if (found := shutil.which(name, path=PLACES)) is None:
        raise ProgramMissingError(
            f"No {name} was found. As root, on Debian or Ubuntu: tests/servers.sh install {package}"
        )
    return found


def skip_without_redis():
    """Skip the test if Redis is missing. Up to Python 3.13, for which a wheel contains it, raise the error instead."""
    try:
        find_redis()
    except RedisMissingError as error:
        if sys.version_info < (3, 14):
            raise
        pytest.skip(str(error))


@contextmanager
def in_thread(server):
    """Run a server in a thread until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
