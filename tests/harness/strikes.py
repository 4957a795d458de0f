"""Strikes break a process at a planned place, as often as planned, and are counted.

Before a strike, the process leaves a mark: a file that only one process can create, and that survives every kill.
"""

import itertools
import os
import signal
from dataclasses import dataclass

from testproject.harness.processes import wait_until

#: How many seconds a held process waits for its owner. A working run needs far less.
PATIENCE = 180.0


@dataclass(frozen=True)
class Strike:
    """What happens to a process that reaches a place with a message."""

    place: str
    #: ``child`` kills the process, ``main`` its parent, ``group`` its whole session. ``freeze`` stops it with SIGSTOP,
    #: and ``hold`` holds it until the mark ``go.<label>`` is left.
    act: str
    #: The strike hits messages whose number, at the end of their label, is a multiple of this.
    every: int = 1
    #: Added to the numbers that are hit: 3, 13, 23 and so on instead of 0, 10, 20.
    offset: int = 0
    #: Only messages whose label contains this are hit.
    among: str = ""
    #: The maximum number of hits per message.
    times: int = 1

    def meets(self, place, label, number):
        return place == self.place and (number - self.offset) % self.every == 0 and self.among in label


class Strikes:
    """The strikes that a process was started with."""

    def __init__(self, marks, strikes=()):
        self.marks = marks
        #: The label of the current message, if there is one.
        self.label = ""
        self._strikes = list(strikes)

    def here(self, place):
        """Call this at a place: strike if a strike is due for the current message."""
        if self.label:
            self.at(place, self.label)

    def at(self, place, label, number=None):
        """Call this at a place with a message: strike if a strike is due."""
        for strike in self._strikes:
            if strike.meets(place, label, int(label.rpartition("-")[2]) if number is None else number):
                for time in range(1, strike.times + 1):
                    if self.marks.leave(f"{strike.act}.{label}.{time}"):
                        ACTS[strike.act](self.marks, label)
                        break

    def each(self, place):
        """Return a function for a place without messages. Each call counts as a message, numbered from 1."""
        passes = itertools.count(1)
        return lambda: self.at(place, place, next(passes))


def hold(marks, label):
    """Wait until the owner leaves the mark ``go.<label>``."""
    wait_until(lambda: marks.exists(f"go.{label}"), f"the mark go.{label}", PATIENCE)


ACTS = {
    "child": lambda marks, label: os.kill(os.getpid(), signal.SIGKILL),
    "main": lambda marks, label: os.kill(os.getppid(), signal.SIGKILL),  # this process continues
    "group": lambda marks, label: os.killpg(os.getpgid(0), signal.SIGKILL),
    "freeze": lambda marks, label: os.kill(os.getpid(), signal.SIGSTOP),
    "hold": hold,
}


def held(marks):
    """The labels of messages whose processes are held and wait for the mark ``go.<label>``."""
    labels = [path.name.removeprefix("hold.").rpartition(".")[0] for path in marks.found("hold.*")]
    return [label for label in labels if not marks.exists(f"go.{label}")]
