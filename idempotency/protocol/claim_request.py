"""What a caller claims: an operation, a scope and a payload, and whether a new operation may start."""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.db import router
from django.utils.functional import cached_property

from ..conf import CLOCK_SKEW
from ..exceptions import KeyExpiredError, KeyInvalidError, RequestError
from ..identity.fingerprint import Payload
from ..identity.keys import is_derived, time_of
from ..identity.scope import Scope
from ..models import IdempotencyRecord
from ..operation import Policy
from ..store import Store, store_for


@dataclass(frozen=True)
class ClaimRequest:
    """The operation, scope and payload to claim."""

    policy: Policy
    scope: Scope
    payload: Payload
    #: Raised instead of starting a new operation; None if it may start.
    refusal: RequestError | None = None

    @cached_property
    def store(self) -> Store:
        """This thread's store for the record's database."""
        return store_for(
            router.db_for_write(IdempotencyRecord, operation=self.scope.operation, account_id=self.scope.account_id)
        )


def refusal_to_begin(policy: Policy, key: str) -> RequestError | None:
    """The error for a request that would start a new operation under this key, or None if it may.

    After a record's retention, a late retry would run again. ``max_key_age`` refuses such a retry, and so it must
    refuse a key without a timestamp. Only a new operation is refused: a recorded outcome is replayed, and a released or
    abandoned claim is the same operation.

    Why nothing runs twice: a record is kept for ``retention`` from its first request, and the key is made before that
    request. So a retry whose record is gone has a key older than ``retention``, if all clocks agree. They may differ by
    ``CLOCK_SKEW``, so ``max_key_age`` plus ``CLOCK_SKEW`` is at most ``retention``, and a key from further in the
    future is refused, too. The clock is this server's, because the database's clock would cost a round trip.

    A derived key has no timestamp. It is accepted, because its sender is another operation, which sends this key in
    every attempt. Nothing runs twice if ``retention`` is longer than all attempts of the sender together.
    """
    if policy.max_key_age is None:
        return None
    made = time_of(key)
    if made is None:
        if is_derived(key):
            return None
        return KeyInvalidError(
            "This operation needs an Idempotency-Key that contains a timestamp: a version 7 UUID or a ULID."
        )
    age = time.time() - made
    if age < -CLOCK_SKEW.total_seconds():
        return KeyInvalidError("The timestamp in the Idempotency-Key is in the future. Check the client's clock.")
    if age > policy.max_key_age.total_seconds():
        return KeyExpiredError()
    return None
