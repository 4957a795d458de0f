"""Does the harness see anything? It must fail where a message loses its identity, and where one is never sent."""

from __future__ import annotations

import pytest

from tests.delivery import names
from tests.delivery.faults import run
from tests.delivery.stage import Stage

pytestmark = pytest.mark.postgres


def test_a_message_that_is_a_new_one_each_time_is_seen_as_doubled(shared: Stage) -> None:
    verdict = run(shared, "relay-killed", 20, sender=names.WITHOUT_IDENTITY)

    assert verdict.kept.doubled > 0
    assert not verdict.passed


def test_a_message_that_is_marked_and_never_sent_is_seen_as_lost(shared: Stage) -> None:
    verdict = run(shared, "relays-at-once", 20, sender=names.MOST)

    assert verdict.kept.lost > 0
    assert not verdict.passed
