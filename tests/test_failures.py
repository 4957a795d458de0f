"""Each entry of ``FAILURES.md`` has a test, or says why it has none, and no test names an entry that doesn't exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.plugin import marks

TESTS = Path(__file__).parent
NO_TEST = "*No test: "


def used() -> set[str]:
    """The marks in the sources of all tests, whichever of them are collected here."""
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")]
    return {name for text in texts for name in re.findall(r"mark\.((?:scenario|failure)_\w+)", text)}


def test_each_entry_has_a_test_or_a_reason() -> None:
    listed = marks()
    assert {name for name, text in listed.items() if NO_TEST not in text} == used()
    assert all(text.endswith((".*", ".")) for text in listed.values())


def test_the_entries_are_numbered_from_one() -> None:
    numbers: dict[str, list[int]] = {"scenario": [], "failure": []}
    for name in marks():
        kind, _, number = name.partition("_")
        numbers[kind].append(int(number))
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
    assert all(numbers.values())
