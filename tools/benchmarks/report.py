"""Figures as Markdown tables."""

from __future__ import annotations

from tools.reports import markdown


class Table:
    """A title, a row of headings, and rows of cells. ``note`` explains the table."""

    def __init__(self, title: str, headings: tuple[str, ...], note: str = "") -> None:
        self.title = title
        self.headings = headings
        self.note = note
        self.rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def __str__(self) -> str:
        text = f"### {self.title}\n\n{markdown(self.headings, self.rows)}"
        return f"{text}\n\n{self.note}" if self.note else text


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
