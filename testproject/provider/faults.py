"""The faults that a caller can ask for."""

from enum import StrEnum


class Fault(StrEnum):
    """What goes wrong with a call.

    A fault strikes the first call of a label only (or of a key, if there is no label), so that a retry gets through.
    """

    REFUSE = "refuse"  # 402, without an effect; this fault strikes every call
    ERROR_BEFORE = "error_before"  # 500, without an effect
    ERROR_AFTER_SUCCESS = "error_after_success"  # 500, although it has paid
    HANG = "hang"  # never answers and never pays
    SUCCEED_THEN_HANG = "succeed_then_hang"  # pays and never answers
    LATE = "late"  # pays after its caller has given up, like a call that was delayed on its way


FAULTS = tuple(fault.value for fault in Fault)
