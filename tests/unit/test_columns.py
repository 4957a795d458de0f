"""What the columns are made of on each database. A database that isn't here is stood in for by its name alone."""

from __future__ import annotations

import pytest
from django.db import connections

from idempotency.models import IdempotencyRecord

KEY_COLUMNS = ("account_id", "operation", "idempotency_key")


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
    for name in KEY_COLUMNS:
        column = IdempotencyRecord._meta.get_field(name).db_parameters(connection)
        assert column.get("collation") == collation
