"""The pages about tests and the audit: their tests pass, and their tables are complete."""

from __future__ import annotations

import unittest

import pytest
from django.urls import path

from idempotency import testing
from idempotency.http.route_audit import Verdict
from idempotency.testing.checks import CHECKS
from tests.docs.conftest import RunPage
from tests.docs.pages import code, section, table, text_of

PAGE = "how-to/test-protected-views.md"


@pytest.mark.once
@pytest.mark.django_db(transaction=True)
def test_the_tests_of_the_page_pass(run_page: RunPage, settings: pytest.MonkeyPatch) -> None:
    view = run_page("how-to/protect-a-view.md")["create_transfer"]
    settings.ROOT_URLCONF = (path("transfers/", view),)  # type: ignore[attr-defined]
    page = run_page(PAGE)
    result = unittest.TestResult()
    for case in ("TransferTests", "TransferStateTests"):
        unittest.defaultTestLoader.loadTestsFromTestCase(page[case]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (2, [], [])


def test_every_check_and_every_helper_is_listed() -> None:
    rows = table(section(PAGE, "Repeat a request in every way"))
    assert sorted(code(row[0]) or "" for row in rows) == sorted(CHECKS)
    helpers = {
        (code(row[0]) or "").partition("(")[0] for row in table(section(PAGE, "Start from a state of the record"))
    }
    assert helpers <= set(testing.__all__)
    assert len(helpers) == 4


def test_every_verdict_of_the_audit_is_explained() -> None:
    rows = table(text_of("how-to/audit-a-project.md"))
    assert [code(row[0]) for row in rows] == [str(verdict) for verdict in Verdict]
