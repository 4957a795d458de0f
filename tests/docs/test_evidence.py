"""The page of evidence is as the results of the runs have it, and no void run is a result."""

from __future__ import annotations

import json

import pytest

from tools.evidence.__main__ import PAGE, RESULTS, page, results


@pytest.mark.once
def test_the_page_is_as_the_results_have_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


@pytest.mark.parametrize("planted", [{"orders": 0}, {"violations": 1}, {"fired": 0}])
def test_a_void_run_is_refused(planted: dict[str, int]) -> None:
    line = json.loads(RESULTS.read_text(encoding="utf-8").splitlines()[0]) | {"what": "walks", "orders": 1} | planted
    with pytest.raises(ValueError, match="void"):
        list(results(json.dumps(line)))
