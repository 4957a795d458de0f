"""The shape of all work that is done in bounded batches: what one batch came to, and batch after batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

_Result = TypeVar("_Result", bound="BatchResult")


@dataclass
class BatchResult:
    """What one batch came to, as counts of rows. The sum of several is what all of them came to."""

    #: Whether the batch found fewer rows than it may take: nothing more is due, or others are at it.
    exhausted: bool = field(default=True, kw_only=True)

    @property
    def touched(self) -> int:
        """How many rows it has changed."""
        raise NotImplementedError

    def __add__(self: _Result, later: _Result) -> _Result:  # noqa: PYI019 - Self is of Python 3.11
        """This batch and a later one of the same run, as one.

        Counts are added and mappings are merged. Everything else is what the later batch says.
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
        """Plain data, for a task's result."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


def in_batches(take: Callable[[_Result | None], _Result]) -> Iterator[_Result]:
    """Take batch after batch until nothing more is due. The caller may stop between any two.

    :param take: takes one batch. It is given the batch before, or None if there was none.
    """
    batch = None
    while batch is None or not batch.exhausted:
        batch = take(batch)
        yield batch


def check_batch_size(batch_size: int, largest: int) -> None:
    """:raises ValueError: the batch size is not between 1 and ``largest``."""
    if not 1 <= batch_size <= largest:
        raise ValueError(f"batch_size must be between 1 and {largest}, not {batch_size}.")
