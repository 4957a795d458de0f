"""Named places between any two of which a process may die.

Tests put a function under a place's name, and it is called there: to kill, to stall, to raise. In production the
registry is empty, nothing in the environment can fill it, and a place costs one look at an empty dictionary.
"""

from __future__ import annotations

from collections.abc import Callable

PLACES = (
    "claim.before",  # nothing has been sent
    "claim.sent",  # the insert has run; if it needs a COMMIT, that has not
    "claim.committed",  # others see the claim
    "handler.before",  # in the business transaction, if there is one
    "render.before",  # the handler has returned
    "render.after",
    "complete.sent",  # the completing update has run, its COMMIT has not
    "complete.committed",  # business state and outcome are there; nobody has been answered
    "release.before",
    "release.sent",  # the update has run; if it needs a COMMIT, that has not
    "heartbeat.before",
    "step.started",  # the step's look-up has found nothing
    "step.stored",
    "replay.read",  # the outcome is read, nothing is answered
    "takeover.sent",  # the update has run; if it needs a COMMIT, that has not
    "sweep.selected",  # a batch of abandoned claims is locked
    "reconcile.before",  # the claim is taken over, nobody has been asked
    "reconcile.found",  # the answer is there, nothing is recorded
    "purge.selected",
    "relay.claimed",  # a batch of messages is leased, nothing is sent
    "relay.published",  # the broker has confirmed one message, nothing is marked
    "relay.marked",  # those that were confirmed are marked as sent
)

armed: dict[str, Callable[[], None]] = {}


def fault_point(place: str) -> None:
    if armed:
        armed.get(place, _nothing)()


def _nothing() -> None: ...
