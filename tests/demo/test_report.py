"""The demo's table shows what the documentation explains."""

from __future__ import annotations

from django.conf import settings

from testproject.demo.acts import ORDERS


def test_every_row_that_the_documentation_explains_is_shown() -> None:
    page = (settings.BASE_DIR / "docs/reference/sample-project.md").read_text()
    orders = page.partition("## The sample project's orders\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in orders.splitlines() if line.startswith("| ")][1:]
    shown = {row.label for row in ORDERS.rows}
    assert len(rows) == 4
    assert [name for row in rows for name in split_names(row) if name not in shown] == []


def split_names(row: str) -> list[str]:
    """One of the names has a comma of its own."""
    return [row] if row.startswith("effects, in") else row.split(", ")
