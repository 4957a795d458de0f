"""The heartbeat: a thread that renews a claim's lease while its handler runs, and knows when to stop.

A heartbeat proves that the process lives, not that the work goes on, so its total is capped: a hung handler keeps its
claim until the cap and not longer. A renewal that finds the lease lost, or that fails until the lease must be over,
marks the claim, and the handler is stopped at its next look: ``renew``, ``ensure_owned``, ``step``, ``derive_key``, or
the recording of its outcome.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections

from ..exceptions import UnavailableError
from . import claims
from .claims import Claim
from .faults import fault_point

logger = logging.getLogger("idempotency")

#: Three chances a lease: one renewal may fail, and one may be late, before it is over.
RENEWALS_A_LEASE = 3


@contextmanager
def heartbeat(claim: Claim) -> Iterator[None]:
    """Keep the claim alive during the block, if its operation asks for it."""
    cap = claim.operation.heartbeat
    # SQLite has one writer: while our transaction is open nobody can take over, and no renewal could be written either.
    needless = claim.operation.transaction and connections[claim.using].vendor == "sqlite"
    if cap is None or needless or claim.shares_connection:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_beat, args=(claim, cap.total_seconds(), stop), name="idempotency-heartbeat", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()  # it renews in milliseconds or waits for ``stop``; a renewal must not outlive the attempt


def _beat(claim: Claim, cap: float, stop: threading.Event) -> None:
    lease = claim.operation.lease.total_seconds()
    begun = held_since = time.monotonic()  # durations only; every moment in the record is the database's
    try:
        while not stop.wait(lease / RENEWALS_A_LEASE):
            now = time.monotonic()
            if now - begun < cap:
                fault_point("heartbeat.before")
                try:
                    if not claims.renew(claim):
                        claim.lost = True
                        return
                    held_since = now
                    continue
                except UnavailableError:
                    logger.warning("Operation %r: its lease could not be renewed", claim.operation.name, exc_info=True)
            if now - held_since >= lease:
                claim.lost = True  # over, as far as this process can tell
                return
    except BaseException:
        # Whatever ended this thread (no thread or no memory left, a bug), nobody renews the lease any more.
        claim.lost = True
        raise
    finally:
        connections.close_all()
