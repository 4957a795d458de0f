"""What happens around a statement: something just before it, its plan, or the same on a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import connection, connections

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> T:
    """Run ``call`` on a connection of its own, in the middle of what this one does."""

    def closing() -> T:
        try:
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(max_workers=1) as elsewhere:
        return elsewhere.submit(closing).result(60)


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
