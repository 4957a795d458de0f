"""Django signals for events of records: for counters, alerts and audit trails.

Every signal is sent after the event and outside of the package's transactions, with ``send_robust``: if a receiver
raises an error, Django logs it. The sender is the ``Operation``, or the model whose rows were purged or relayed, or
None if an operator resolved a record whose operation this process doesn't know. All signals except ``purged``,
``relayed`` and ``unprotected`` carry ``account_id``, ``idempotency_key`` (str) and ``attempt`` (int; 0 if unknown). The
reference lists when each is sent, and its other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

if TYPE_CHECKING:
    from .identity.scope import Scope
    from .operation import Operation

__all__ = [
    "claimed",
    "completed",
    "conflicted",
    "dead_lettered",
    "key_reused",
    "lease_lost",
    "message_dead",
    "parked",
    "purged",
    "recovered",
    "relayed",
    "released",
    "replayed",
    "taken_over",
    "unprotected",
    "unrecorded",
]

# With caching, Django looks up the receivers once for each operation instead of once for each request.
claimed: Signal = Signal(use_caching=True)
taken_over: Signal = Signal(use_caching=True)
completed: Signal = Signal(use_caching=True)
replayed: Signal = Signal(use_caching=True)
conflicted: Signal = Signal(use_caching=True)
key_reused: Signal = Signal(use_caching=True)
released: Signal = Signal(use_caching=True)
unrecorded: Signal = Signal(use_caching=True)
unprotected: Signal = Signal(use_caching=True)
parked: Signal = Signal(use_caching=True)
lease_lost: Signal = Signal(use_caching=True)
recovered: Signal = Signal()  # without caching, because its sender may be None
purged: Signal = Signal()
relayed: Signal = Signal()
message_dead: Signal = Signal()
dead_lettered: Signal = Signal()

#: The events of a record, by the name under which they are counted.
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
    """Call a function for each event of ``EVENTS``.

    :param uid: identifies the function. A later function with the same ``uid`` replaces it.
    :param receive: called with the operation's name ("" if unknown), the event's name, and the attempt's number.
    """
    for event, signal in EVENTS.items():

        def note(sender: Operation | None, attempt: int, event: str = event, **arguments: Any) -> None:
            receive("" if sender is None else sender.name, event, attempt)

        signal.disconnect(dispatch_uid=f"idempotency.{uid}.{event}")
        signal.connect(note, weak=False, dispatch_uid=f"idempotency.{uid}.{event}")


def send(signal: Signal, operation: Operation | None, scope: Scope, attempt: int, **more: Any) -> None:
    signal.send_robust(
        sender=operation, account_id=scope.account_id, idempotency_key=scope.idempotency_key, attempt=attempt, **more
    )
