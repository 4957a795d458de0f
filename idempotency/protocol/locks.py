"""``hold()``: a lock that lasts until the operation's transaction has ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from django.db.transaction import Atomic

from ..store import open_transactions
from .context import current_claim
from .execution import is_here

T = TypeVar("T")


@contextmanager
def hold(lock: AbstractContextManager[T, bool | None]) -> Iterator[T]:
    """Take a lock for the block, and keep it until the operation's transaction has ended::

        with idempotency.hold(lock()):
            number = next_free_number()
            Invoice.objects.create(number=number)

    An ``atomic()`` in a protected handler is a savepoint, so ``with lock():`` would end before other requests can see
    what the block wrote. ``hold()`` releases the lock after COMMIT or rollback, in the thread that took it. If no
    transaction of an operation is open at the end of the block, for example because the request has no key, the lock is
    released there.

    An error in releasing it after the transaction is logged, and does not change the response.

    :param lock: a context manager, such as an advisory lock, or a lock of a cache, of Redis or of ``threading``.
    :raises TypeError: the lock is not a context manager, or it is ``atomic()``.
    :raises RuntimeError: the lock opens a transaction, or the caller is a coroutine under a claim.
    """
    if issubclass(type(lock), Atomic):
        raise TypeError("hold() takes a lock, not atomic(). Rows that a transaction locks stay locked until it ends.")
    claim = current_claim()
    if claim is not None and not is_here(claim):
        if claim.locks is not None and _in_coroutine():
            raise RuntimeError(
                f"hold() was called by a coroutine of {claim.operation}, whose transaction is in another thread. Take "
                f"the lock and write in one function, and call it by sync_to_async()."
            )
        claim = None  # another thread commits over another connection
    before = open_transactions()
    with ExitStack() as taken:
        value = taken.enter_context(lock)
        if open_transactions() != before:
            raise RuntimeError(
                "The lock of hold() opens a transaction, and can't outlast it. Use it with `with`, or take a lock that "
                "opens none."
            )
        try:
            yield value
        finally:
            if claim is not None and claim.locks is not None and claim.ownership.in_transaction:
                claim.locks.append((taken.pop_all(), sys.exc_info()))


def _in_coroutine() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
