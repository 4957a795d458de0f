"""Figures as tables in Markdown, as the documentation shows them."""

from __future__ import annotations


class Table:
    """A title, a row of headings and rows of cells. ``note`` says how to read it."""

    def __init__(self, title: str, headings: tuple[str, ...], note: str = "") -> None:
        self.title = title
        self.headings = headings
        self.note = note
        self.rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def __str__(self) -> str:
        lines = [self.headings, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.headings))]

        def written(cells: tuple[str, ...]) -> str:
            first, *others = (cells[column] for column in range(len(widths)))
            padded = [first.ljust(widths[0])] + [
                cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)
            ]
            return "| " + " | ".join(padded) + " |"

        rule = "| " + "-" * widths[0] + " | " + " | ".join("-" * (width - 1) + ":" for width in widths[1:]) + " |"
        text = [f"### {self.title}", "", written(self.headings), rule, *(written(row) for row in self.rows)]
        return "\n".join([*text, "", self.note] if self.note else text)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def microseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:.0f} µs"


def bytes_of(number: float) -> str:
    return f"{number:.0f} B"


def times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:.2f} ×"


def count(number: float | None) -> str:
    return "–" if number is None else f"{number:g}"
