"""What holds on databases that stand in here by their name or by the codes of their errors alone."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError, connections

from idempotency.models import IdempotencyRecord
from idempotency.sql.portable import PortableStore

store = PortableStore(connections["default"])


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


@pytest.mark.failure_mode(20)
@pytest.mark.parametrize(
    ("vendor", "mariadb", "collation"),
    [
        ("postgresql", False, "C"),
        ("mysql", False, "utf8mb4_0900_bin"),
        ("mysql", True, "utf8mb4_nopad_bin"),
        ("sqlite", False, None),
    ],
)
def test_keys_are_compared_byte_for_byte(
    vendor: str, mariadb: bool, collation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections["default"]
    monkeypatch.setattr(connection, "vendor", vendor)
    monkeypatch.setattr(connection, "mysql_is_mariadb", mariadb, raising=False)
    for name in ("account_id", "operation", "idempotency_key"):
        column = IdempotencyRecord._meta.get_field(name).db_parameters(connection)
        assert column.get("collation") == collation
