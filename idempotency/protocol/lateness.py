"""Keys that come too late: past the retention their record may be gone, and the same request would run again.

A key that carries its time can be refused then. It is enough to refuse what would *begin* under it: an outcome that is
still recorded is replayed, whatever the age of its key, and a released or abandoned claim is the same operation.

Why nothing runs twice: a record is kept for ``ttl`` from its first request, and a key is made before that. So a retry
that finds no record any more has a key that is older than ``ttl``, if all clocks agree. They may differ by
``CLOCK_SKEW``, so ``max_key_age`` plus that is at most ``ttl``, and a key from further in the future is refused, too.
"""

from __future__ import annotations

import time

from ..exceptions import KeyExpiredError, KeyInvalidError, RequestError
from ..identity.timed import time_of
from ..operation import CLOCK_SKEW, Operation


def refusal_to_begin(operation: Operation, key: str) -> RequestError | None:
    """The error for a request that would begin a new operation under this key, or None if it may.

    The clock is this server's and not the database's, because to ask the database would be one more round trip.
    """
    if operation.max_key_age is None and not operation.timed_keys:
        return None
    made = time_of(key)
    if made is None:
        if not operation.timed_keys:
            return None
        return KeyInvalidError(
            "This operation needs an Idempotency-Key that carries its time: a version 7 UUID or a ULID."
        )
    age = time.time() - made
    if age < -CLOCK_SKEW.total_seconds():
        return KeyInvalidError("The Idempotency-Key carries a time in the future. Set the client's clock.")
    if operation.max_key_age is not None and age > operation.max_key_age.total_seconds():
        return KeyExpiredError()
    return None
