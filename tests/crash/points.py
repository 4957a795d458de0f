"""The cells of the matrix: points × faults × declarations, and why some combinations are excluded."""

from dataclasses import dataclass
from itertools import product

#: Points in the order in which an operation reaches them. Those that ``idempotency.protocol.faults`` doesn't name are
#: in the harness: in its handler, its call to the provider and its reconciler, and around COMMIT.
POINTS = {
    "claim.before": "before the claim",
    "claim.unanswered": "claim sent, not answered",
    "claim.sent": "claim answered",
    "claim.committed": "claim committed",
    "handler.before": "before the handler",
    "on_commit": "in on_commit",
    "handler.wrote": "after the first write",
    "step.started": "step started",
    "downstream.sent": "downstream call sent",
    "downstream.answered": "downstream call answered",
    "step.stored": "step stored",
    "heartbeat.before": "in a heartbeat",
    "begin.before": "before begin()",
    "begin.after": "after begin()",
    "render.before": "before rendering",
    "render.after": "after rendering",
    "complete.before": "before the completing update",
    "complete.sent": "completing update sent",
    "commit.sent": "COMMIT sent",
    "complete.committed": "committed, not answered",
    "release.before": "before the release",
    "release.sent": "release sent",
    "sweep.selected": "sweep selected",
    "takeover.sent": "take-over sent",
    "reconcile.before": "before the reconciler",
    "reconciler.asked": "reconciler running",
    "reconcile.found": "reconciler answered",
    "replay.read": "replay read",
    "purge.selected": "purge selected",
}

FAULTS = {
    "kill": "kill -9",
    "stop": "SIGSTOP beyond the lease; SIGCONT when another attempt has won and ended",
    "stop-live": "SIGSTOP beyond the lease; SIGCONT while the attempt that has won is still running",
    "raise": "an exception",
    "drop": "the database session is terminated",
}

DECLARATIONS = {
    "inside": "transaction=True, REEXECUTE",
    "again": "transaction=False, REEXECUTE, derived key",
    "begun": "transaction=False, REEXECUTE, derived key, begin() before its row",
    "ask": "transaction=False, Reconcile",
    "park": "transaction=False, PARK",
}

#: The declarations whose rows are committed together with the outcome.
WITH_ROWS = ("inside", "begun")

#: A World's kinds of databases.
DATABASES = ("citus", "mariadb", "postgres", "sqlite")

#: Points that a successful first request doesn't reach.
OF_A_SWEEP = ("sweep.selected",)
OF_RECONCILING = ("reconcile.before", "reconciler.asked", "reconcile.found")
OF_RELEASING = ("release.before", "release.sent")

#: Only the provider can stop a call that a frozen process is about to make. Without a deadline, ``NotExecuted`` would
#: be a false finding. So the call expires with its lease, and the cell waits for that in real time.
LATE_CALL = ("step.started",)


@dataclass(frozen=True)
class Cell:
    point: str
    fault: str
    declaration: str
    seed: int = 0

    @property
    def kind(self):
        """The cell without its seed."""
        return self.point, self.fault, self.declaration

    def __str__(self):
        return "-".join((*self.kind, str(self.seed)))


#: The excluded cells, by point, fault, declaration and database, where ``*`` stands for any; and the reason.
EXCLUSIONS = {
    "* drop * sqlite": "SQLite is a library in the process: there is no session that another process could terminate",
    "claim.unanswered * * mariadb,sqlite": "one call of the driver sends a statement and reads its answer",
    "commit.sent drop * mariadb": "one call of the driver sends COMMIT and reads its answer",
    "complete.sent * * postgres": "the completing update and its COMMIT are one message",
    "begin.before,begin.after * inside,again,ask,park *": "only the handler of a payment calls begin()",
    "complete.sent * again,ask,park citus,sqlite": "an outcome outside of the handler's transaction commits at once",
    "complete.sent stop-live again,ask mariadb": "such an outcome commits at once, so no attempt can win",
    "heartbeat.before * inside sqlite": "no heartbeat: nothing can take over during the only writer's transaction",
    "step.started,step.stored * inside *": "a crash would undo the step with the transaction, so it is refused",
    f"{','.join(OF_RECONCILING)} * inside,again,begun,park *": "only Reconcile declares a reconciler",
    f"{','.join(OF_RELEASING)} * park *": "PARK never releases a claim",
    "takeover.sent * park *": "PARK claims are never taken over",
    # At these points no other attempt can win.
    "replay.read,complete.committed,purge.selected stop-live * *": "the outcome is recorded, or nothing is owned",
    "commit.sent stop-live * *": "COMMIT was sent before the process froze, so no attempt can win",
    "on_commit stop-live inside,begun *": "on_commit follows the one COMMIT, so no attempt can win",
    f"{','.join(sorted({*POINTS} - {'claim.before'}))} stop-live park *": "no other attempt runs a parked operation",
}


def covers(pattern, cell, database):
    """Whether a pattern of ``EXCLUSIONS`` matches the cell."""
    here = zip(pattern.split(), (*cell.kind, database), strict=True)
    return all(names == "*" or name in names.split(",") for names, name in here)


#: On SQLite a frozen process with an open transaction holds the file's only write lock, so no rival can win before it
#: wakes. The cell still runs: meanwhile all other requests must be refused without effects, and one must succeed later.
#: A sweep has a transaction open at the first point, and a handler inside the record's transaction at the others.
SQLITE_WRITE_LOCK = ("sweep.selected",)
SQLITE_WRITE_LOCK_BEGUN = (
    *("begin.after", "handler.wrote", "render.before", "render.after", "complete.before", "complete.sent"),
)
SQLITE_WRITE_LOCK_INSIDE = ("handler.before", "downstream.sent", "downstream.answered", *SQLITE_WRITE_LOCK_BEGUN)


def blocks_everybody(cell, database):
    points = {"inside": SQLITE_WRITE_LOCK_INSIDE, "begun": SQLITE_WRITE_LOCK_BEGUN}.get(cell.declaration, ())
    return database == "sqlite" and cell.fault.startswith("stop") and cell.point in (*points, *SQLITE_WRITE_LOCK)


def excluded(cell, database):
    """Why the cell is excluded, or None."""
    return next((reason for pattern, reason in EXCLUSIONS.items() if covers(pattern, cell, database)), None)


def cells(seeds=1, first=0):
    for seed, point, fault, declaration in product(range(first, first + seeds), POINTS, FAULTS, DECLARATIONS):
        yield Cell(point, fault, declaration, seed)
