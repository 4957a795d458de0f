"""What tests declare, and have to leave as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from idempotency.operation import registry


@contextmanager
def forgetting_operations(prefix: str = "") -> Iterator[None]:
    """Forget what is declared in the block, or what of it has the prefix, so that another test may use the name."""
    before = {operation.name for operation in registry}
    try:
        yield
    finally:
        for operation in list(registry):
            if operation.name not in before and operation.name.startswith(prefix):
                registry.discard(operation.name)
