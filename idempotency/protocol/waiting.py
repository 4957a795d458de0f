"""Acquires a claim, and waits or recovers as the operation declares."""

from __future__ import annotations

import time

from .. import signals
from ..exceptions import InProgressError
from ..options.values import Wait
from ..outcome import Outcome
from .acquisition import acquire
from .claim_request import ClaimRequest
from .ownership import Ownership
from .recovery import reconcile

#: The pauses, in seconds, between the reads of a waiting duplicate. They are short at first and then grow.
FIRST_POLL = 0.02
SLOWEST_POLL = 0.25


def acquire_or_wait(request: ClaimRequest) -> Ownership | Outcome:
    """Call ``acquire``, and wait or recover as the operation declares."""
    answer = request.policy.in_progress
    deadline = time.monotonic() + (answer.seconds if isinstance(answer, Wait) else 0)
    pause, has_waited = FIRST_POLL, False
    while True:
        try:
            settled = acquire(request, expect_record=has_waited)
            if isinstance(settled, Ownership) and settled.abandoned:
                outcome = reconcile(settled)
                return settled if outcome is None else outcome
            return settled
        except InProgressError:
            left = deadline - time.monotonic()
            if left <= 0:
                signals.send(signals.conflicted, request.policy.operation, request.scope, 0)
                raise
            # No transaction and no lock is held meanwhile, and each poll is one read.
            time.sleep(min(pause, left))  # no notification works on every database
            pause, has_waited = min(pause * 2, SLOWEST_POLL), True
