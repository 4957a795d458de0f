"""What all work in bounded batches has in common: the result of a batch, and a loop over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from django.db import connections

_Result = TypeVar("_Result", bound="BatchResult")
_Outcome = TypeVar("_Outcome")


@dataclass
class BatchResult:
    """The result of one batch, as counts of rows. Results can be added: the sum is the result of all the batches."""

    #: Whether the batch found fewer rows than it may take. Then nothing more is due, or other processes hold the rest.
    exhausted: bool = field(default=True, kw_only=True)

    @property
    def touched(self) -> int:
        """How many rows the batch has changed."""
        raise NotImplementedError

    def __add__(self: _Result, later: _Result) -> _Result:  # noqa: PYI019 - Self needs Python 3.11
        """Add a later batch of the same run.

        Counts are added and mappings are merged. Every other value is taken from the later batch.
        """
        sums: dict[str, Any] = {}
        for one in fields(self):
            ours, theirs = getattr(self, one.name), getattr(later, one.name)
            if isinstance(ours, dict):
                sums[one.name] = ours | theirs
            elif isinstance(ours, int) and not isinstance(ours, bool):
                sums[one.name] = ours + theirs
            else:
                sums[one.name] = theirs
        return type(self)(**sums)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data, which a task can return."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


def in_batches(take: Callable[[_Result | None], _Result]) -> Iterator[_Result]:
    """Take batch after batch until nothing more is due. The caller may stop between any two.

    :param take: takes one batch. Its argument is the result of the batch before, or None for the first batch.
    """
    batch = None
    while batch is None or not batch.exhausted:
        batch = take(batch)
        yield batch


@contextmanager
def side_by_side(jobs: int) -> Iterator[Callable[[Sequence[Callable[[], _Outcome]]], list[_Outcome]]]:
    """Run ``jobs`` calls at the same time, each in a thread with database connections of its own.

    A single job runs in the caller's thread, over the caller's connection.

    :returns: a context manager, whose value is a function that makes the calls, waits for all of them, and returns
        their results or raises their first error.
    """
    if jobs == 1:
        yield lambda calls: [call() for call in calls]
        return
    with ExitStack() as stack:
        # One executor for each thread, because connections can only be closed by their thread.
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(jobs)]
        for thread in threads:
            stack.callback(thread.submit, connections.close_all)

        def run(calls: Sequence[Callable[[], _Outcome]]) -> list[_Outcome]:
            running = [thread.submit(call) for thread, call in zip(threads, calls, strict=True)]
            wait(running)
            return [future.result() for future in running]

        yield run


def check_batch_size(batch_size: int, largest: int) -> None:
    """:raises ValueError: the batch size is not between 1 and ``largest``."""
    if not 1 <= batch_size <= largest:
        raise ValueError(f"batch_size must be between 1 and {largest}, not {batch_size}.")
