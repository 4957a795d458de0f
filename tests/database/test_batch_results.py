"""Batches: how the results of several add up, and where a run of them ends."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from itertools import islice

import pytest

from idempotency.operate.batches import BatchResult, in_batches
from idempotency.operate.purge import PurgeResult
from idempotency.operate.sweep import RecoveryResult
from idempotency.outbox.relay import RelayResult

EARLY, LATE = (datetime(2000, 1, day, tzinfo=UTC) for day in (1, 2))


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


def test_a_batch_has_touched_what_it_has_changed() -> None:
    assert PurgeResult(3).touched == 3
    assert RelayResult(sent=1, postponed=2, dead=4, put_back=8).touched == 7
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
