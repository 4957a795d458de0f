"""``README.md`` names tests that exist, for modules that exist, and leaves no part of the package out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "idempotency"
ROWS = [
    (re.findall(r"`([^`]+)`", modules), re.findall(r"tests/[\w/.]+", tests))
    for modules, tests in re.findall(
        r"^\| (`.+?) \| (`.+?) \| \d+ \|$", (ROOT / "tests/README.md").read_text(), re.MULTILINE
    )
]


def test_each_row_names_what_exists() -> None:
    assert ROWS
    for modules, tests in ROWS:
        assert tests
        missing = [name for name in modules if not (PACKAGE / name).exists()]
        missing += [name for name in tests if not (ROOT / name).exists()]
        assert not missing


def test_each_module_has_a_row() -> None:
    named = [PACKAGE / name for modules, _ in ROWS for name in modules]
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    left_out = [path for path in modules if not any(path.is_relative_to(place) for place in named)]
    assert [str(path.relative_to(PACKAGE)) for path in left_out] == []
