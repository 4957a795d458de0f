"""In CI, only listed reasons may skip a test."""

import pytest

from tests.plugin import ALLOWED_SKIPS, judged

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("ci", "reason", "outcome"),
    [("true", "no server", "failed"), ("true", f"{ALLOWED_SKIPS[1]}, as", "skipped"), ("", "no server", "skipped")],
)
def test_a_skip_for_another_reason_fails_in_ci_only(ci, reason, outcome, monkeypatch):
    monkeypatch.setenv("CI", ci)
    where = ("tests/test_views.py", 7, f"Skipped: {reason}")
    assert judged(pytest.CollectReport("tests", "skipped", where, [])).outcome == outcome
    passed = pytest.CollectReport("tests", "passed", None, [])
    assert judged(passed) is passed
