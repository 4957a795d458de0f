"""Fault points: named places where tests can kill or stall a process, or raise an error.

The code calls ``fault_point["claim.before"]()``. These functions do nothing, and no environment variable can change
that. A test replaces one with its own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

PLACES = (
    "claim.before",  # nothing is sent
    "claim.sent",  # the insert has run; if it needs a COMMIT, that has not run
    "claim.committed",  # other processes see the claim
    "handler.before",  # in the business transaction, if there is one
    "begin.before",  # begin() has renewed the lease
    "begin.after",  # the handler runs in its transaction
    "render.before",  # the handler has returned
    "render.after",
    "complete.before",  # the outcome is known, but not sent
    "complete.committed",  # business state and outcome are committed, but no response is sent
    "release.before",
    "release.sent",  # the update is committed
    "heartbeat.before",
    "step.started",  # no result of the step was found
    "step.stored",
    "replay.read",  # the outcome is read, but no response is sent
    "takeover.sent",  # the update has run; if it needs a COMMIT, that has not run
    "sweep.selected",  # a batch of abandoned claims is locked
    "reconcile.before",  # the claim is taken over, but the reconciler has not run
    "reconcile.found",  # the reconciler has answered, but nothing is recorded
    "purge.selected",
    "relay.claimed",  # a batch of messages is leased, but nothing is sent
    "relay.published",  # the broker has confirmed one message, but nothing is marked
    "relay.marked",  # the confirmed messages are marked as sent
)

fault_point: Final[dict[str, Callable[[], object]]] = {}


def disarm() -> None:
    """Make every fault point do nothing."""
    fault_point.clear()
    fault_point.update(dict.fromkeys(PLACES, lambda: None))


disarm()
