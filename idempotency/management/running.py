"""What the commands share that run for long: their exit codes, and how a signal ends them."""

from __future__ import annotations

import signal
import threading
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from django.core.management.base import DjangoHelpFormatter

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_WORK_LEFT = 3
EXIT_UNKNOWN_OPERATIONS = 4
EXIT_SIGNAL = 128  # plus the signal's number, as shells do

# A signal that is handled doesn't end a sleep, so a pause is slept in slices of this.
SLICE = 0.2  # seconds


class HelpFormatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the epilog."""


class Stop:
    """Notes the first SIGINT or SIGTERM instead of dying of it. A second one has its usual effect."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.restore()

    def restore(self) -> None:
        while self._previous:
            signum, handler = self._previous.popitem()
            signal.signal(signum, handler or signal.SIG_DFL)  # None: it was not installed from Python

    def sleep(self, seconds: float) -> bool:
        """Sleep, unless a signal came or comes. Whether to go on."""
        end = time.monotonic() + seconds
        while self.signum is None and (left := end - time.monotonic()) > 0:
            # The pause that was asked for, in slices, so that a signal is seen soon.
            time.sleep(min(left, SLICE))
        return self.signum is None


@contextmanager
def stop_between_batches() -> Iterator[Stop]:
    stop = Stop()
    # Python lets no other thread than the main one handle signals. There the process's own handling remains.
    if threading.current_thread() is threading.main_thread():
        stop.listen()
    try:
        yield stop
    finally:
        stop.restore()
