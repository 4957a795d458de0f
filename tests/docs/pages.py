"""The documentation's pages and their parts: blocks of code, sections, tables."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
#: Each page by its name: its path below ``docs/``, ``README.md``, or the sample project's README.
PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
PAGES |= {"README.md": README, "testproject/README.md": ROOT / "testproject/README.md"}
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def each_page():
    return pytest.mark.parametrize("name", PAGES)


def text_of(name):
    return PAGES[name].read_text()


def blocks(name, *languages):
    return [text for language, text in FENCED.findall(text_of(name)) if language in languages]


def section(name, heading):
    """The text below a heading of the second or third level."""
    _, found, rest = re.sub(r"^###? ", "## ", text_of(name), flags=re.MULTILINE).partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def table(text):
    """The rows of the tables in ``text``, as cells, without their heads."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    rules = [number for number, row in enumerate(cells) if all(cell and set(cell) <= set("-:") for cell in row)]
    return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


def code(cell):
    """The text in backticks in a table's cell, or None if the cell is anything else."""
    found = re.fullmatch(r"`([^`]+)`", cell)
    return found[1] if found else None
