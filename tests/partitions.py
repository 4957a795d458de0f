"""Partitioned tables, made by the SQL of the documentation."""

from django.db import connection

from tests.docs.pages import blocks

PAGE = "how-to/large-installations.md"


def partition(count):
    """Split the tables of records and steps into ``count`` partitions each."""
    (statements,) = blocks(PAGE, "postgresql")
    assert "integer := 16;" in statements
    with connection.cursor() as cursor:
        cursor.execute(statements.replace("integer := 16;", f"integer := {count};"))
        cursor.execute("RESET lock_timeout")
