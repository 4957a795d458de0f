"""What tests declare, and have to leave as they found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from django.db import connection
from django.dispatch import Signal

from idempotency import Operation
from idempotency.operation import registry


@contextmanager
def forgetting_operations(prefix: str = "") -> Iterator[None]:
    """Forget what is declared in the block, or what of it has the prefix, so that another test may use the name."""
    before = {operation.name for operation in registry}
    homes = dict(registry._homes)
    try:
        yield
    finally:
        for operation in list(registry):
            if operation.name not in before and operation.name.startswith(prefix):
                registry.discard(operation.name)
        registry._homes.update(homes)


def redeclare(monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> None:
    """Let an operation have other options, as in a later release of its project."""
    policy_of = vars(Operation)["policy"].fget

    @cache
    def policy(operation: Operation) -> Any:
        return replace(policy_of(operation), **(options if operation.name == name else {}))

    monkeypatch.setattr(Operation, "policy", property(policy))


@contextmanager
def free_names() -> Iterator[None]:
    """Let functions in the block have the names of operations that others have, as examples do in the documentation."""
    with forgetting_operations():
        registry._homes.clear()
        yield


@contextmanager
def receiving(signal: Signal, then: Callable[[], object] = lambda: None) -> Iterator[list[dict[str, Any]]]:
    """The arguments with which the signal is sent in the block, each time outside of transactions."""
    received: list[dict[str, Any]] = []
    in_transaction: list[bool] = []

    def receive(**arguments: Any) -> None:
        received.append(arguments)
        in_transaction.append(connection.in_atomic_block)
        then()

    signal.connect(receive)
    try:
        yield received
    finally:
        signal.disconnect(receive)  # a weak reference ends with the garbage collection, in another test
    assert not any(in_transaction)
