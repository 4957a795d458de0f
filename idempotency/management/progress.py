"""Shows the progress of a command: a bar on a terminal if rich is installed, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

#: Without a terminal, a line at this interval shows in the log that a long run is alive.
REPORT_EVERY = 10.0  # seconds

#: A function that is called with the number of rows done so far, and with a line that says so.
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
    """Show the progress of the block's work.

    :param label: the label of the bar.
    :param total: returns the number of rows in all. Called for a bar only.
    :param write: writes one line.
    :param options: the command's options, for ``verbosity`` and ``stderr``.
    :param every: seconds between two lines. A verbose command writes every line.
    :param leaves_bar: whether the bar stays on the terminal when the work is done.
    :returns: a context manager, whose value is the function that the block calls to report.
    """
    verbosity: int = options["verbosity"]
    # The bar is written to standard error, so that standard output can be redirected to a file.
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
        # During the run more rows may become due than were counted before it.
        yield lambda done, line: bar.update(task, completed=done, total=max(total, done))
