"""Operating the records: purge, sweep, statistics, erasure, and operators' decisions.

Plain functions, called by commands (``management``), tasks (``contrib.celery.tasks``) and admin pages.
"""

from ..public import adopt
from .erasure import AccountRows, ErasureResult, erase_account, erase_batches, find_rows
from .purge import PurgeResult, bodies_past_retention, due, purge_batches, purge_body_batches
from .resolutions import ResolutionRefusedError, forget, mark_not_executed, record_outcome, release
from .statistics import Number, Precision, Stats, purge_overdue, stats
from .sweep import RecoveryResult, abandoned, recover_batches

__all__ = [
    "AccountRows",
    "ErasureResult",
    "Number",
    "Precision",
    "PurgeResult",
    "RecoveryResult",
    "ResolutionRefusedError",
    "Stats",
    "abandoned",
    "bodies_past_retention",
    "due",
    "erase_account",
    "erase_batches",
    "find_rows",
    "forget",
    "mark_not_executed",
    "purge_batches",
    "purge_body_batches",
    "purge_overdue",
    "record_outcome",
    "recover_batches",
    "release",
    "stats",
]

adopt(__name__, map(globals().get, __all__))
