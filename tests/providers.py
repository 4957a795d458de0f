"""Shared parts of tests with the stand-in provider: its faults by kind, and a bounded wait."""

import time

#: Timeouts in seconds: for a provider that hangs, and for one that answers.
IMPATIENCE = 1.0
PATIENCE = 30.0

#: Faults of a payout's first call, by whether the provider has paid.
PAID = ["succeed_then_hang", "error_after_success", "late"]
UNPAID = ["error_before", "hang"]
#: Faults after which the caller gets no answer.
HANGING = {"succeed_then_hang", "late", "hang"}


def eventually(condition):
    """Whether the condition becomes true in time, while another process works."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)  # polling: another process has no event to wait for
    return condition()
