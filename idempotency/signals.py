"""Django signals for what happens to records: for counters, alerts and audit trails.

Every signal is sent after the event, outside of the package's transactions, with ``send_robust``: if a receiver raises
an error, Django logs it and nothing else changes. The sender is the ``Operation`` unless the table names another. All
signals but ``purged`` and ``relayed`` carry ``account_id``, ``idempotency_key`` (str) and ``attempt`` (int), which is 0
if the attempt isn't known. ``claimed`` and ``taken_over`` also carry ``request_hash`` (str), the payload's fingerprint.

=================  ==================================================================================================
``claimed``        an attempt owns the record and is about to run: the first one, or a retry of a released one
``taken_over``     an attempt has taken over an abandoned claim
``completed``      the outcome is recorded
``replayed``       a retry was answered from the recorded outcome
``conflicted``     a duplicate was told that another attempt is in progress
``key_reused``     the key came with another payload and was refused
``released``       an attempt failed without an effect; a retry runs at once
``unrecorded``     an attempt answered with a status below 500 that its operation declares as no outcome, and had no
                   effect; a retry runs at once
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

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

if TYPE_CHECKING:
    from .identity.scope import Scope
    from .operation import Operation

# With caching, Django looks up the receivers once for each operation and not for each request.
claimed: Signal = Signal(use_caching=True)
taken_over: Signal = Signal(use_caching=True)
completed: Signal = Signal(use_caching=True)
replayed: Signal = Signal(use_caching=True)
conflicted: Signal = Signal(use_caching=True)
key_reused: Signal = Signal(use_caching=True)
released: Signal = Signal(use_caching=True)
unrecorded: Signal = Signal(use_caching=True)
parked: Signal = Signal(use_caching=True)
lease_lost: Signal = Signal(use_caching=True)
recovered: Signal = Signal()  # without caching, because its sender may be None
purged: Signal = Signal()
relayed: Signal = Signal()
message_dead: Signal = Signal()

#: What can happen to a record, by the name under which it is counted.
EVENTS: Mapping[str, Signal] = {
    "claimed": claimed,
    "taken_over": taken_over,
    "completed": completed,
    "replayed": replayed,
    "conflicted": conflicted,
    "key_reused": key_reused,
    "released": released,
    "unrecorded": unrecorded,
    "lease_lost": lease_lost,
    "recovered": recovered,
    "parked": parked,
}


def connect_events(uid: str, receive: Callable[[str, str, int], None]) -> None:
    """Have a function called for each event of ``EVENTS``.

    :param uid: the name of the function. A later function of the same name replaces it.
    :param receive: called with the operation's name, the event's, and the attempt's number. The operation is "" if a
        person settled a record of an operation that this process doesn't know.
    """
    for event, signal in EVENTS.items():

        def note(sender: Operation | None, attempt: int, event: str = event, **arguments: Any) -> None:
            receive("" if sender is None else sender.name, event, attempt)

        signal.disconnect(dispatch_uid=f"idempotency.{uid}.{event}")
        signal.connect(note, weak=False, dispatch_uid=f"idempotency.{uid}.{event}")


def send(signal: Signal, operation: Operation | None, scope: Scope, attempt: int, **more: Any) -> None:
    signal.send_robust(
        sender=operation,
        account_id=scope.account_id,
        idempotency_key=scope.idempotency_key,
        attempt=attempt,
        **more,
    )
