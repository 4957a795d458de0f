"""Management commands, called as tests call them: what they write and how they end, in front of a terminal or not."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.management import call_command


def run_command(name: str, *arguments: str, **options: Any) -> tuple[int, list[str], list[str]]:
    """Run a command: its exit code, the lines of its output, and those of its errors."""
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    try:
        call_command(name, *arguments, stdout=output, **{"stderr": errors, **options})
    except SystemExit as exited:
        code = int(str(exited.code))
    return code, output.getvalue().splitlines(), errors.getvalue().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wrong_arguments(largest_batch: int) -> pytest.MarkDecorator:
    """``options`` that no command with ``--watch`` takes, and the ``message`` that says why."""
    bounds = f"--batch-size must be between 1 and {largest_batch}"
    return pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 0}, bounds),
            ({"batch_size": largest_batch + 1}, bounds),
            ({"max_batches": 0}, "--max-batches must be 1 or more"),
            ({"watch": 0.0}, "--watch must be above 0"),
            ({"watch": float("nan")}, "--watch must be above 0"),
            ({"watch": 3601.0}, "--watch must be above 0 and up to 3600 seconds"),
            ({"watch": 1.0, "dry_run": True}, "--watch and --dry-run exclude each other"),
            ({"database": "nowhere"}, "--database: there is no database 'nowhere'"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
