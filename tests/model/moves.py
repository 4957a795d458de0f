"""The moves of a record. The model must make exactly these, and histories of real runs no others."""

from typing import NamedTuple

#: The old and new states of a record, and by how much its attempt grows. "absent" stands for no record.
MOVES = {
    ("absent", "in_progress", 0): "claim",
    ("in_progress", "completed", 0): "complete",
    ("in_progress", "recoverable", 0): "release, or the sweep",
    ("in_progress", "parked", 0): "the sweep, or a retry, of an operation that may not run again",
    ("in_progress", "in_progress", 1): "take over, or start over past the retention",
    ("recoverable", "in_progress", 1): "claim again",
    ("completed", "in_progress", 1): "start over past the retention",
    ("completed", "absent", 0): "purge",
    ("recoverable", "absent", 0): "purge",
}
#: The moves that the model leaves out: decisions of an operator.
OF_OPERATORS = {("in_progress", "recoverable", 1): "release by an operator"}
#: The moves that need the end of the retention, or an erasure of the account.
OF_THE_END = {("completed", "in_progress", 1), ("completed", "absent", 0)}


class Seen(NamedTuple):
    """A record after a step."""

    pk: int
    attempt: int
    status: str
    request_hash: str
    retention_over: bool


ABSENT = Seen(0, 0, "absent", "", False)


def is_legal(before, after, moves, *, forgetting=False):
    """Whether ``before`` can become ``after`` in at most ``moves`` moves.

    :param forgetting: whether an erasure may delete it before the end of its retention.
    """
    first, last = before or ABSENT, after or ABSENT
    if first == last:
        return True
    reached = {(first.status, first.attempt)}
    for _ in range(moves):
        reached |= {
            (new, 0 if new == "absent" else (attempt or 1) + more)
            for status, attempt in reached
            for old, new, more in MOVES.keys() | OF_OPERATORS.keys()
            if old == status and ((old, new, more) not in OF_THE_END or first.retention_over or forgetting)
        }
    if (last.status, last.attempt) not in reached:
        return False
    # The payload changes only with a new operation.
    begun_again = first.retention_over or forgetting or "absent" in {first.status, last.status}
    return begun_again or (first.pk, first.request_hash) == (last.pk, last.request_hash)
