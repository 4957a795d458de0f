"""The operation that all servers in Python run: append a line to a file, sleep, return a name of this execution."""

import json
import os
import time
from uuid import uuid4

TAKES = 0.2  # seconds


def append_line():
    with open(os.environ["EFFECTS"], "ab") as effects:  # noqa: PTH123 - appending is atomic
        effects.write(b"line\n")


def begin(body):
    """:returns: the status and the seconds that the body requests, and a name of this execution.

    A refusal has no effect.
    """
    wanted = json.loads(body)
    status = wanted.get("outcome", 201)
    if status < 300:
        append_line()
    return status, wanted.get("seconds", TAKES), uuid4().hex


def run(body):
    """``begin``, and then sleep."""
    status, seconds, name = begin(body)
    time.sleep(seconds)  # the operation itself, during which duplicates arrive
    return status, name
