"""Crowds of frozen processes, all of which wake after others have won. None of them may leave a trace."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.crash.arena import Arena
from tests.crash.cells import run_cell
from tests.crash.matrix import Matrix
from tests.crash.points import Cell

#: Every zombie holds a session, its cell another one and its rival a third; a server takes a hundred by default.
CROWD = 25
#: Where a write is pending, or about to be made.
PLACES = ("claim.committed", "handler.before", "handler.wrote", "downstream.answered", "render.after", "complete.sent")


def run_zombies(arena: Arena, count: int) -> Matrix:
    matrix = Matrix(arena.database)
    for first in range(0, count, CROWD):
        cells = [
            Cell(PLACES[number % len(PLACES)], "stop", "inside", seed=number)
            for number in range(first, min(first + CROWD, count))
        ]
        together = threading.Barrier(len(cells))
        with ThreadPoolExecutor(len(cells)) as pool:
            matrix.verdicts += pool.map(partial(run_cell, arena, together=together), cells)
    return matrix
