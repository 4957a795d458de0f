"""Batches: how the results of several add up, and where a run of them ends."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone
from itertools import islice

import pytest

from idempotency.outbox.relay import RelayResult
from idempotency.upkeep.batches import BatchResult, check_batch_size, in_batches
from idempotency.upkeep.retention import PurgeResult
from idempotency.upkeep.sweep import RecoveryResult

EARLY, LATE = (datetime(2000, 1, day, tzinfo=timezone.utc) for day in (1, 2))


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [
        (
            RecoveryResult(recoverable=1, completed=2, parked=3, postponed=4, exhausted=False),
            RecoveryResult(recoverable=10, completed=20, parked=30, postponed=40, unknown_operations=Counter(a=1)),
            RecoveryResult(recoverable=11, completed=22, parked=33, postponed=44, unknown_operations=Counter(a=1)),
        ),
        (
            RelayResult(sent=1, postponed=2, dead=3, put_back=4, unavailable={"a": "first", "b": "first"}),
            RelayResult(10, 20, 30, 40, unavailable={"a": "second"}, exhausted=False),
            RelayResult(11, 22, 33, 44, unavailable={"a": "second", "b": "first"}, exhausted=False),
        ),
        (PurgeResult(1, EARLY, exhausted=False), PurgeResult(2, LATE), PurgeResult(3, LATE)),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_add_up_and_the_later_one_says_whether_more_is_due(
    first: BatchResult, second: BatchResult, total: BatchResult
) -> None:
    before = repr(first)
    assert first + second == total
    assert repr(first) == before


@pytest.mark.parametrize(
    ("result", "expected", "touched"),
    [
        (
            RecoveryResult(recoverable=1, completed=2, parked=4, postponed=8, unknown_operations=Counter(a=2)),
            {"recoverable": 1, "completed": 2, "parked": 4, "postponed": 8, "unknown_operations": {"a": 2}},
            15,
        ),
        (
            RelayResult(sent=1, postponed=2, dead=4, put_back=8, unavailable={"a": "b"}),
            {"sent": 1, "postponed": 2, "dead": 4, "put_back": 8, "unavailable": {"a": "b"}},
            7,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_report_is_plain_data_and_tells_what_was_done_in_counts(
    result: RecoveryResult | RelayResult, expected: dict[str, object], touched: int
) -> None:
    assert result.as_dict() == {**expected, "exhausted": True}
    assert json.loads(json.dumps(result.as_dict())) == result.as_dict()
    assert result.touched == touched


def test_a_purge_has_touched_what_it_deleted() -> None:
    assert PurgeResult(3).touched == 3
    with pytest.raises(NotImplementedError):
        _ = BatchResult().touched


def test_batches_are_taken_one_by_one_until_one_is_exhausted_and_each_knows_the_one_before() -> None:
    asked: list[PurgeResult | None] = []

    def take(before: PurgeResult | None) -> PurgeResult:
        asked.append(before)
        return PurgeResult(len(asked), exhausted=len(asked) == 3)

    list(islice(in_batches(take), 2))
    assert len(asked) == 2  # none ahead of the one that is asked for
    asked.clear()
    taken = list(in_batches(take))
    assert [batch.deleted for batch in taken] == [1, 2, 3]
    assert asked == [None, *taken[:2]]


@pytest.mark.parametrize("size", [0, -1, 11])
def test_a_batch_size_out_of_bounds_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size must be between 1 and 10, not {size}"):
        check_batch_size(size, 10)
    for allowed in (1, 10):
        check_batch_size(allowed, 10)
