"""Clients that claim and complete at a steady rate, while something else happens to the table.

Each is a process of its own, so that it doesn't wait for the Python of the others.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import uuid
from typing import NamedTuple

from typing_extensions import Self

PROCESSES = 4
RATE = 25.0  # operations a second of each process

WAIT = 60.0  # seconds


class Timed(NamedTuple):
    """One operation: when it began (of ``time.monotonic()``), and the seconds of its two statements."""

    began: float
    claim: float
    complete: float


class Claimants:
    """A context in which the clients run. Their measurements are there at its end."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.timed: list[Timed] = []
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.scale.claimants", self.database]
        for _ in range(PROCESSES):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
        for process in self._processes:
            assert process.stdout
            if not process.stdout.readline():  # it says when it is connected
                raise RuntimeError("A client could not start; its error is above.")
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            output, _ = process.communicate("", timeout=WAIT)
            self.timed += [Timed(*each) for each in json.loads(output)]

    def between(self, start: float, end: float) -> list[Timed]:
        return [each for each in self.timed if start <= each.began < end]


def main(database: str) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    import django

    django.setup()
    from django.db import connection

    from .metering import Operation

    connection.settings_dict["NAME"] = database
    connection.ensure_connection()
    operation = Operation(lambda: str(uuid.uuid4()))
    operation.run()
    print("ready", flush=True)
    timed = []
    due = time.monotonic()
    # The end of the input is the end of the run.
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        due = max(due, time.monotonic() - 1) + 1 / RATE  # after a long wait it catches up for one second
        began = time.monotonic()
        operation.run()
        timed.append(Timed(began, operation.claim.seconds[-1], operation.complete.seconds[-1]))
    print(json.dumps(timed))


if __name__ == "__main__":
    main(*sys.argv[1:])
