"""How a run shows how far it has come: a bar on a terminal, if rich is installed, and plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

#: Where nobody watches, a line now and then shows in the log that a long run is alive.
REPORT_EVERY = 10.0  # seconds

#: Called with how much is done, and with a line that says so.
Report = Callable[[int, str], None]


def progress(
    label: str,
    total: Callable[[], int],
    write: Callable[[str], None],
    options: Mapping[str, Any],
    *,
    every: float,
    leaves_bar: bool,
) -> AbstractContextManager[Report]:
    """Reports, for as long as the block, of work of which there is ``total()`` in all.

    :param label: of the bar.
    :param write: takes the lines.
    :param options: the command's, of which ``verbosity`` and ``stderr`` are looked at.
    :param every: seconds between two lines, unless the command is verbose and writes all of them.
    :param leaves_bar: whether the bar stays on the terminal when the work is done.
    """
    verbosity: int = options["verbosity"]
    # The bar goes where errors go, so that the output can be kept in a file while somebody watches.
    stream: TextIO = options.get("stderr") or sys.stderr
    if verbosity and stream.isatty():
        try:
            import rich  # noqa: F401
        except ImportError:
            pass
        else:
            return _bar(stream, label, total(), leaves_bar)
    return _lines(write, verbosity, every)


@contextmanager
def _lines(write: Callable[[str], None], verbosity: int, every: float) -> Iterator[Report]:
    last = time.monotonic()

    def report(done: int, line: str) -> None:
        nonlocal last
        if verbosity > 1 or (verbosity and time.monotonic() - last >= every):
            last = time.monotonic()
            write(line)

    yield report


@contextmanager
def _bar(stream: TextIO, label: str, total: int, stays: bool) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=not stays) as bar:
        task = bar.add_task("", total=total)
        # More can fall due during a run than was counted before it.
        yield lambda done, line: bar.update(task, completed=done, total=max(total, done))
