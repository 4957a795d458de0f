"""The estimate of what a load needs of the database."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from idempotency.management.sizing import PAGE, Load, Size


def table_of(*arguments: str, **options: Any) -> dict[str, list[str]]:
    out = StringIO()
    call_command("idempotency_sizing", *arguments, stdout=out, **options)
    lines = [re.split(r" {2,}", line.strip()) for line in out.getvalue().splitlines()]
    return {label: cells for label, *cells in lines}


def test_a_load_is_estimated_as_the_table_of_ten_million_records_was_measured() -> None:
    """``docs/explanation/growth.md`` has the measurements, of a table without free space."""
    measured = Size(Load(operations_per_day=10e6, retention=1, body=420))
    assert measured.table / 1.2 == pytest.approx(7_449e6, rel=0.01)
    assert measured.indexes / 1.1 == pytest.approx(2_487e6, rel=0.01)


def test_few_operations_between_checkpoints_touch_a_page_each_and_many_touch_every_page_once() -> None:
    few = Size(Load(operations_per_day=1e6, checkpoint=1))
    assert few.whole_pages == pytest.approx(1, rel=0.01)
    many = Size(Load(operations_per_day=1e6, checkpoint=100 * 86_400))
    assert many.whole_pages * 100e6 == pytest.approx(many.scope_index / PAGE, rel=0.01)


def test_the_command_shows_a_column_for_each_load() -> None:
    shown = table_of("1e3", "1e9", "--retention", "1", "--purge-rate", "20")
    assert shown["operations a day"] == ["1.0 thousand", "1.0 billion"]
    assert shown["records"] == ["1.0 thousand", "1.0 billion"]
    assert shown["COMMITs a second, peak"] == ["0.0", "34.7 thousand"]
    assert shown["one purge is at work, a day"] == ["50 s", "578.7 days"]
    assert all(len(cells) == 2 for cells in shown.values())


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "many"])
def test_a_load_that_is_no_positive_number_is_refused(wrong: str) -> None:
    with pytest.raises(CommandError, match="is not a positive number"):
        table_of("1e6", f"--body={wrong}")
