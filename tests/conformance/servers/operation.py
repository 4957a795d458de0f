"""The operation that all servers in Python run: append a line to a file, sleep, answer the line's number."""

import json
import os
import time

TAKES = 0.2  # seconds


def append_line():
    """:returns: how many lines there are."""
    path = os.environ["EFFECTS"]
    with open(path, "ab+") as effects:  # noqa: PTH123 - appending is atomic
        effects.write(b"line\n")
        effects.flush()
        effects.seek(0)
        return effects.read().count(b"\n")


def run(body):
    """:returns: the status that the body asks for, and the number of the line."""
    status = json.loads(body).get("outcome", 201)
    number = append_line()
    time.sleep(TAKES)  # the operation itself, during which duplicates arrive
    return status, number
