"""Fault points: named places at which tests can kill or stall a process or raise an error.

A test registers a function under the name of a place, and the code calls it there. In production the registry is empty,
no environment variable can fill it, and a fault point costs one look at an empty dictionary.
"""

from __future__ import annotations

from collections.abc import Callable

PLACES = (
    "claim.before",  # nothing is sent
    "claim.sent",  # the insert has run; if it needs a COMMIT, that has not run
    "claim.committed",  # other processes see the claim
    "handler.before",  # in the business transaction, if there is one
    "render.before",  # the handler has returned
    "render.after",
    "complete.sent",  # the completing update has run, but not its COMMIT
    "complete.committed",  # business state and outcome are committed, but no response is sent
    "release.before",
    "release.sent",  # the update has run; if it needs a COMMIT, that has not run
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

armed: dict[str, Callable[[], None]] = {}


def fault_point(place: str) -> None:
    if armed:
        armed.get(place, _nothing)()


def _nothing() -> None: ...
