"""What tests declare, and have to leave as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def free_names() -> Iterator[None]:
    """Let functions in the block have the names of operations that others have, as examples do in the documentation."""
    with forgetting_operations():
        registry._homes.clear()
        yield
