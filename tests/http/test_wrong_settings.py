"""A wrong setting that no system check has stopped: nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency import PARK, claim
from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, effects

pytestmark = pytest.mark.django_db(transaction=True)

WRONG = [
    {"TTL": timedelta(0)},
    {"TTL": timedelta(days=-1)},
    {"LEASE": timedelta(0)},
    {"METHODS": ["post", "patch"]},
    {"MAX_BODY": 0},
    {"RECORDABLE": "no.such.thing"},
    {"MAX_RETRY_AFTER": 30},
]


@pytest.mark.failure_mode(10)
@pytest.mark.parametrize("entries", WRONG, ids=str)
@pytest.mark.parametrize("policy", [{}, {"transaction": False, "recovery": PARK}], ids=["inside", "outside"])
def test_nothing_runs_under_a_wrong_setting(
    alice: Caller,
    serve_operation: Callable[..., None],
    settings: Any,
    caplog: pytest.LogCaptureFixture,
    entries: dict[str, Any],
    policy: dict[str, Any],
) -> None:
    serve_operation(**policy)
    settings.IDEMPOTENCY = entries
    for _ in range(2):
        assert alice.post(key="k").status_code == 500
    assert f"ImproperlyConfigured: IDEMPOTENCY[{next(iter(entries))!r}]" in caplog.text
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.failure_mode(10)
@pytest.mark.parametrize("entries", WRONG, ids=str)
def test_no_block_runs_under_a_wrong_setting(settings: Any, entries: dict[str, Any]) -> None:
    settings.IDEMPOTENCY = entries
    with (
        pytest.raises(ImproperlyConfigured, match=f"IDEMPOTENCY.*{next(iter(entries))}"),
        claim("tests.wrong_setting", account_id="1", key="k"),
    ):
        pytest.fail("The block ran.")
    assert not IdempotencyRecord.objects.exists()
