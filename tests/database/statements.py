"""What happens around a statement: something just before it, or its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection


@contextmanager
def before_statement(containing: str, call: Callable[[], object]) -> Iterator[None]:
    """Call ``call`` each time that this connection is about to execute a statement that contains ``containing``."""

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if containing in sql:
            call()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield


@contextmanager
def explaining(containing: str) -> Iterator[list[str]]:
    """The plans of those statements of the block that contain ``containing``, as PostgreSQL explains them."""
    plans: list[str] = []

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if containing in sql:
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN {sql}", params)
                plans.append("\n".join(line for (line,) in cursor.fetchall()))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield plans
