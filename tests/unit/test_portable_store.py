"""The store of the databases that have none of their own reads the codes of MySQL's errors."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError

from idempotency.sql.portable import PortableStore

store = PortableStore("default")


def test_only_a_unique_constraint_that_is_broken_is_a_duplicate() -> None:
    assert store.is_duplicate(IntegrityError(1062, "Duplicate entry 'k'"))
    assert not store.is_duplicate(IntegrityError(1048, "Column 'status' cannot be null"))


def test_a_missing_table_is_permanent_and_a_lost_connection_is_not() -> None:
    assert store.is_permanent(ProgrammingError(1146, "Table 'record' doesn't exist"))
    assert not store.is_permanent(OperationalError(2006, "Server has gone away"))


@pytest.mark.django_db
def test_a_transaction_that_can_not_be_watched_is_not_taken_for_one_that_has_ended() -> None:
    with store.watch_transaction() as watch:
        watch.look()
    assert watch.ended is False
