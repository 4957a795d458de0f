"""Where a process is broken, and how it is made sure that this happens once for a message and is counted.

A strike leaves a mark before it strikes: a file that only one process can create, and that outlives every kill. So
"how often did it happen" is answered by counting files.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

#: Seconds for which a process that is held waits for the harness. Nothing that works comes near it.
PATIENCE = 60.0


class Marks:
    """A directory of marks, as the processes and the harness see it."""

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

    def found(self, pattern: str) -> list[Path]:
        return sorted(self.directory.glob(pattern))

    def count(self, pattern: str) -> int:
        return len(self.found(pattern))

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (self.directory / name).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Nobody has left the mark {name}.")
            # Between two bounded looks; what is waited for is looked at, not timed.
            time.sleep(0.005)


class Strikes:
    """The fault that a process was started with.

    ``place`` is where it strikes, ``act`` what happens, ``every`` says of how many messages one is struck, and
    ``times`` how often one message is, at most.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.marks = Marks(spec["marks"])
        fault = spec.get("fault") or {}
        self.place: str = fault.get("place", "")
        self.act: str = fault.get("act", "")
        self.every: int = fault.get("every", 1)
        self.times: int = fault.get("times", 1)
        #: The message that this process is at, for places that don't know of messages.
        self.label = ""

    def at(self, place: str, label: str) -> None:
        if place != self.place or int(label.rpartition("-")[2]) % self.every:
            return
        for time_ in range(1, self.times + 1):
            if self.marks.leave(f"{self.act}.{label}.{time_}"):
                self._strike(label)
                return

    def at_message_under_way(self, place: str) -> None:
        if self.label:
            self.at(place, self.label)

    def _strike(self, label: str) -> None:
        if self.act == "child":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.act == "main":
            os.kill(os.getppid(), signal.SIGKILL)  # and this process runs on
        elif self.act == "group":
            os.killpg(os.getpgid(0), signal.SIGKILL)
        elif self.act == "hold":
            self.marks.wait_for(f"go.{label}")  # while the harness does something to the broker
        else:
            raise ValueError(self.act)
