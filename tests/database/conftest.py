"""How the database isolates what tests of it do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection


@pytest.fixture
def repeatable_read() -> Iterator[None]:
    set_level = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL "
    with connection.cursor() as cursor:
        cursor.execute(set_level + "REPEATABLE READ")
    yield
    with connection.cursor() as cursor:
        cursor.execute(set_level + "READ COMMITTED")
