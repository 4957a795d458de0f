"""The logging filter: each line says which operation it belongs to."""

from __future__ import annotations

import logging

import pytest

from idempotency import claim
from idempotency.log import ClaimFilter

pytestmark = pytest.mark.django_db


def named() -> tuple[object, ...]:
    record = logging.makeLogRecord({})
    assert ClaimFilter().filter(record) is True
    fields = vars(record)
    return fields["idempotency_operation"], fields["idempotency_trace"], fields["idempotency_attempt"]


def test_a_line_bears_the_operation_trace_and_attempt_that_it_was_logged_under() -> None:
    with claim("tests.log", account_id="7", key=f"{'0' * 32}.{'1' * 36}") as run:
        run.result = named()
    assert run.result == ("tests.log", "0" * 32, 1)


def test_outside_of_an_operation_they_are_empty() -> None:
    assert named() == ("", "", "")
