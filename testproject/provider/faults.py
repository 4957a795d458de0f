"""The faults that a caller can select."""

from enum import StrEnum


class Fault(StrEnum):
    """How a call fails.

    A fault only affects the first call with a label, or with a key for a call without a label. So a retry succeeds.
    """

    REFUSE = "refuse"  # 402, without an effect; affects every call
    ERROR_BEFORE = "error_before"  # 500, without an effect
    ERROR_AFTER_SUCCESS = "error_after_success"  # 500, after it has paid
    HANG = "hang"  # never answers and never pays
    SUCCEED_THEN_HANG = "succeed_then_hang"  # pays and never answers
    LATE = "late"  # pays after its caller has given up, like a delayed call


FAULTS = tuple(fault.value for fault in Fault)
