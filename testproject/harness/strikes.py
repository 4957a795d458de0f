"""Where a process is broken, and how it is made sure that this happens as often as planned, and is counted.

A strike leaves a mark before it strikes: a file that only one process can create, and that outlives every kill. So
"how often did it happen" is answered by counting files.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from .processes import wait_until

#: Seconds for which a process that is held waits for its owner. Nothing that works comes near it.
PATIENCE = 180.0


class Marks:
    """A directory of marks, as all processes see it."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    def leave(self, name: str, text: str = "") -> bool:
        """Create the mark; False if it is there already. Once it can be seen its text can be read."""
        draft = self.directory / f".{name}.{os.getpid()}"
        draft.write_text(text)
        try:
            os.link(draft, self.directory / name)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def exists(self, name: str) -> bool:
        return (self.directory / name).exists()

    def found(self, pattern: str) -> list[Path]:
        return sorted(self.directory.glob(pattern))

    def count(self, pattern: str) -> int:
        return len(self.found(pattern))

    def note(self, name: str, word: str) -> None:
        """Append a line to a file, of which many processes may append at once."""
        descriptor = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"{word}\n".encode())  # one write of a short line is one step
        finally:
            os.close(descriptor)

    def notes(self, name: str) -> list[str]:
        """The lines that were appended."""
        path = self.directory / name
        return path.read_text().split() if path.exists() else []


@dataclass(frozen=True)
class Strike:
    """What happens to a process that is at a place with a message."""

    place: str
    #: ``child`` kills the process, ``main`` its parent, ``group`` its whole session. ``freeze`` stops it with SIGSTOP,
    #: and ``hold`` holds it until the mark ``go.<label>`` is left.
    act: str
    #: It strikes messages whose number is a multiple of this: the number at the end of their label.
    every: int = 1
    #: How often one message is struck, at most.
    times: int = 1
    #: If there is one, only the message with this label is struck.
    label: str = ""

    def meets(self, place: str, label: str, number: int) -> bool:
        return place == self.place and number % self.every == 0 and self.label in {"", label}


class Strikes:
    """The strikes that a process was started with."""

    def __init__(self, marks: Marks, strikes: Iterable[Strike] = ()) -> None:
        self.marks = marks
        #: The message at hand, if there is one.
        self.label = ""
        self._strikes = list(strikes)

    def here(self, place: str) -> None:
        """Called by a process that is at a place with the message at hand."""
        if self.label:
            self.at(place, self.label)

    def at(self, place: str, label: str, number: int | None = None) -> None:
        """Called by a process that is at a place with a message: strike it, if that is due."""
        for strike in self._strikes:
            if strike.meets(place, label, int(label.rpartition("-")[2]) if number is None else number):
                for time in range(1, strike.times + 1):
                    if self.marks.leave(f"{strike.act}.{label}.{time}", str(os.getpid())):
                        ACTS[strike.act](self.marks, label)
                        break

    def each(self, place: str) -> Callable[[], None]:
        """For a place that knows of no message: the process's passes are numbered in place of messages."""
        passes = itertools.count(1)
        return lambda: self.at(place, place, next(passes))


def hold(marks: Marks, label: str) -> None:
    """Wait while the owner does something."""
    wait_until(lambda: marks.exists(f"go.{label}"), f"the mark go.{label}", PATIENCE)


ACTS: dict[str, Callable[[Marks, str], None]] = {
    "child": lambda marks, label: os.kill(os.getpid(), signal.SIGKILL),
    "main": lambda marks, label: os.kill(os.getppid(), signal.SIGKILL),  # and this process runs on
    "group": lambda marks, label: os.killpg(os.getpgid(0), signal.SIGKILL),
    "freeze": lambda marks, label: os.kill(os.getpid(), signal.SIGSTOP),
    "hold": hold,
}


def written(strikes: Iterable[Strike]) -> str:
    """Strikes as a text, for the environment of a process."""
    return json.dumps([asdict(strike) for strike in strikes])


def read(text: str) -> list[Strike]:
    return [Strike(**strike) for strike in json.loads(text)]


def held(marks: Marks) -> list[str]:
    """The messages whose processes are held and wait for the mark ``go.<label>``."""
    labels = [path.name.removeprefix("hold.").rpartition(".")[0] for path in marks.found("hold.*")]
    return [label for label in labels if not marks.exists(f"go.{label}")]
