"""The trouble that a caller can wish for."""

from __future__ import annotations

from enum import Enum


class Fault(str, Enum):
    """What goes wrong with a call.

    Each strikes the first call of a label only (of a key, where there is none), or no retry would ever get through.
    """

    REFUSE = "refuse"  # 402, without an effect; the one that strikes every call
    ERROR_BEFORE = "error_before"  # 500, without an effect
    ERROR_AFTER_SUCCESS = "error_after_success"  # 500, though it has paid
    HANG = "hang"  # never answers and never pays
    SUCCEED_THEN_HANG = "succeed_then_hang"  # pays and never answers
    LATE = "late"  # pays only when its caller has given up, as a call does that was held up on its way


FAULTS = tuple(fault.value for fault in Fault)
