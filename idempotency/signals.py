"""Django signals for what happens to records: for counters, alerts and audit trails.

Every signal is sent after the event, outside of the package's transactions, with ``send_robust``: if a receiver raises
an error, Django logs it and nothing else changes. The sender is the ``Operation`` unless the table names another. All
signals but ``purged`` and ``relayed`` carry ``account_id``, ``idempotency_key`` (str) and ``attempt`` (int), which is 0
if the attempt isn't known.

=================  ==================================================================================================
``claimed``        an attempt owns the record and is about to run: the first one, or a retry of a released one
``taken_over``     an attempt has taken over an abandoned claim
``completed``      the outcome is recorded
``replayed``       a retry was answered from the recorded outcome
``conflicted``     a duplicate was told that another attempt is in progress
``key_reused``     the key came with another payload and was refused
``released``       an attempt ended without an effect; a retry runs at once
``parked``         nobody knows how an attempt ended; the record waits for somebody to find out
``recovered``      a sweep, a reconciler or a person settled a record; ``status`` (str) is its new state. The sender
                   is None if a person settled a record of an operation that this process doesn't know
``lease_lost``     an attempt found that another one had taken over, and its writes were rolled back
``purged``         a batch of records past retention was deleted; ``count`` (int). The sender is ``IdempotencyRecord``
``relayed``        a broker has confirmed messages of the outbox; ``count`` (int). The sender is ``OutboxMessage``
``message_dead``   a message was tried too often and waits to be requeued; ``message_id`` (UUID), ``topic`` (str);
                   ``attempt`` is the number of attempts. The sender is ``OutboxMessage``
=================  ==================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

if TYPE_CHECKING:
    from .identity.scope import Scope
    from .operation import Operation

# With caching, Django looks up the receivers once for each operation and not for each request.
claimed = Signal(use_caching=True)
taken_over = Signal(use_caching=True)
completed = Signal(use_caching=True)
replayed = Signal(use_caching=True)
conflicted = Signal(use_caching=True)
key_reused = Signal(use_caching=True)
released = Signal(use_caching=True)
parked = Signal(use_caching=True)
lease_lost = Signal(use_caching=True)
recovered = Signal()  # without caching, because its sender may be None
purged = Signal()
relayed = Signal()
message_dead = Signal()


def send(signal: Signal, operation: Operation | None, scope: Scope, attempt: int, **more: Any) -> None:
    signal.send_robust(
        sender=operation,
        account_id=scope.account_id,
        idempotency_key=scope.idempotency_key,
        attempt=attempt,
        **more,
    )
