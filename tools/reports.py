"""Progress lines and Markdown tables of full runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def say(*words: object) -> None:
    """Print a line and flush it."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def markdown(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table that is readable without rendering: the first column left-aligned, the others right-aligned."""
    lines = [[str(cell) for cell in line] for line in (heads, *rows)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    padded = [[line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))
