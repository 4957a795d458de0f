"""Recovery: what is done about a claim whose process has disappeared, as its operation declares.

A retry that meets such a claim settles it on the spot (``execution.obtain``); a sweep settles those that nobody
retries. Both come through ``settle``. Everything here may be killed anywhere and simply run again: what it has changed
is fenced, and what it has not is found again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.models import Count
from django.http.response import HttpResponseBase

from . import claims, signals
from .claims import Claim
from .conf import settings
from .exceptions import IdempotencyError, InProgressError, LeaseLostError, OutcomeUnknownError, UnavailableError
from .faults import reach
from .lifecycle import Recovery, Status
from .models import IdempotencyRecord, RecordQuerySet
from .operation import Completed, NotExecuted, Unknown, registry
from .outcome import Outcome, outcome_of, outcome_of_result
from .scope import Scope

logger = logging.getLogger("idempotency")

#: An unknown outcome is asked for again after 2, 4, 8 … seconds: soon enough for a provider that is a little late, and
#: at a pace that a provider in trouble can bear.
LONGEST_BACKOFF = 256

DEFAULT_BATCH_SIZE = 100
MAX_BATCH_SIZE = 10_000


def settle(claim: Claim) -> Outcome | None:
    """Ask the operation's reconciler what became of the attempts before this one.

    :returns: the outcome, now recorded; or None: it was not executed, and this claim may run it.
    :raises InProgressError: nobody can say yet, or another reconciler took over from a slow one.
    :raises OutcomeUnknownError: nobody could say often enough, and the record is parked.
    :raises UnavailableError: the finding could not be recorded. It is asked for again when the lease is over.
    """
    reconcile = claim.operation.reconcile
    # Dies in here, or before its finding is recorded: the lease runs out, and the next one asks again. Sleeps in here
    # until another one took over: what it records is fenced on its attempt.
    reach("reconcile.before")
    finding = _ask(claim)
    reach("reconcile.found")
    if isinstance(finding, NotExecuted):
        claim.abandoned = False
        return None
    if isinstance(finding, Completed):
        outcome = _outcome_found(finding, claim)
        if outcome is not None:
            _record(claim, outcome)
            _recovered(claim, Status.COMPLETED)
            return outcome
    try:
        if claim.attempt >= reconcile.max_attempts:
            if claims.park(claim):
                signals.announce(signals.parked, claim.operation, claim.scope, claim.attempt)
                _recovered(claim, Status.FAILED)
            raise OutcomeUnknownError
        backoff = min(2**claim.attempt, LONGEST_BACKOFF)
        claims.postpone(claim, timedelta(seconds=backoff))
    except (DatabaseError, InterfaceError) as error:
        raise UnavailableError(retry_after=1) from error
    raise InProgressError(retry_after=min(backoff, int(settings.max_retry_after.total_seconds()) or 1))


def _record(claim: Claim, outcome: Outcome) -> None:
    try:
        claims.record(claim, outcome)
    except LeaseLostError as error:
        raise InProgressError(retry_after=1) from error


def _ask(claim: Claim) -> Completed | NotExecuted | Unknown:
    operation = claim.operation
    found = IdempotencyRecord.objects.using(claim.using).filter(account_id=claim.scope.account_id, pk=claim.record_id)
    try:
        finding: object = operation.reconcile.find_out(found.get())
    except Exception:
        logger.exception("The reconciler of operation %r failed; its outcome stays unknown", operation.name)
        return Unknown()
    if not isinstance(finding, (Completed, NotExecuted, Unknown)):
        logger.error(
            "The reconciler of operation %r must return Completed(response), NotExecuted() or Unknown(), not %r",
            operation.name,
            finding,
        )
        return Unknown()
    return finding


def _outcome_found(finding: Completed, claim: Claim) -> Outcome | None:
    """None where what the reconciler found can't be recorded: an outcome that can't be replayed is not known."""
    try:
        if isinstance(finding.response, HttpResponseBase):
            return outcome_of(finding.response, claim.operation)
        return outcome_of_result(finding.response, claim.operation)
    except (IdempotencyError, TypeError):
        logger.exception("The reconciler of operation %r found what can't be recorded", claim.operation.name)
        return None


def _recovered(claim: Claim, status: Status) -> None:
    signals.announce(signals.recovered, claim.operation, claim.scope, claim.attempt, status=str(status))


@dataclass
class RecoveryResult:
    """One sweep's batch, as counts of records."""

    #: Now recoverable: the next retry runs.
    recoverable: int = 0
    #: Completed by a reconciler.
    completed: int = 0
    #: Parked: nobody can say.
    parked: int = 0
    #: Still unknown, asked for again after a while.
    postponed: int = 0
    #: Left alone, because no operation of that name is declared in this process.
    unknown_operations: Counter[str] = field(default_factory=Counter)

    @property
    def settled(self) -> int:
        return self.recoverable + self.completed + self.parked

    @property
    def touched(self) -> int:
        return self.settled + self.postponed


def abandoned(using: str | None = None) -> RecordQuerySet:
    """Claims whose lease is over."""
    return RecordQuerySet(IdempotencyRecord, using=using or claims.alias()).abandoned()


def recover_once(*, batch_size: int = DEFAULT_BATCH_SIZE, using: str | None = None) -> RecoveryResult:
    """Settle up to ``batch_size`` abandoned claims of each kind of recovery.

    Safe to run many at once, and to kill: rows that another sweep holds are skipped, each change names the attempt
    or the lease that it was decided on, and nothing is held while a reconciler asks.

    :raises ValueError: the batch size is not between 1 and 10,000.
    :raises DatabaseError: as the database does; what was settled before stays settled.
    """
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ValueError(f"batch_size must be between 1 and {MAX_BATCH_SIZE}, not {batch_size}.")
    using = using or claims.alias()
    by_kind: dict[Recovery, list[str]] = {kind: [] for kind in Recovery}
    for operation in registry:
        by_kind[operation.recovery].append(operation.name)
    result = RecoveryResult()
    result.recoverable = _settle_at_once(using, by_kind[Recovery.REEXECUTE], Status.RECOVERABLE, batch_size)
    result.parked = _settle_at_once(using, by_kind[Recovery.PARK], Status.FAILED, batch_size)
    _reconcile_some(using, by_kind[Recovery.RECONCILE], batch_size, result)
    known = [name for names in by_kind.values() for name in names]
    for name, count in abandoned(using).exclude(operation__in=known).values_list("operation").annotate(Count("id")):
        result.unknown_operations[name] = count
        logger.warning(
            "%d abandoned claim(s) of operation %r are left alone: no such operation is declared in this process. "
            "Declare it in an app's operations.py.",
            count,
            name,
        )
    return result


def _settle_at_once(using: str, operations: Iterable[str], status: Status, limit: int) -> int:
    """Give a whole batch its new state. Nobody has to be asked."""
    names = list(operations)
    if not names:
        return 0
    with transaction.atomic(using=using, durable=True):
        due = abandoned(using).filter(operation__in=names).order_by("lease_expires_at")
        if connections[using].features.has_select_for_update_skip_locked:
            due = due.select_for_update(skip_locked=True)  # a locked row is being taken over, renewed or completed
        found = list(due[:limit])
        reach("sweep.selected")
        # The predicate again: where nothing was locked, a claim may have been taken over since the select.
        due = abandoned(using).filter(account_id__in={row.account_id for row in found})
        changed = due.filter(pk__in=[row.pk for row in found]).update(status=status, lease_expires_at=None)
    for row in found:
        operation = registry.get(row.operation)
        if operation is not None:
            scope = Scope(row.account_id, row.operation, row.idempotency_key)
            if status is Status.FAILED:
                signals.announce(signals.parked, operation, scope, row.attempt)
            signals.announce(signals.recovered, operation, scope, row.attempt, status=str(status))
    return changed


def _reconcile_some(using: str, operations: Iterable[str], limit: int, result: RecoveryResult) -> None:
    names = list(operations)
    if not names:
        return
    due = abandoned(using).filter(operation__in=names).order_by("lease_expires_at")
    for row in list(due[:limit]):
        operation = registry.get(row.operation)
        assert operation is not None  # its name comes from the registry
        claim = claims.take_over_abandoned(operation, row, using)
        if claim is None:
            continue  # another sweep or a retry was faster
        try:
            if settle(claim) is None:
                claims.release(claim)
                result.recoverable += 1
                _recovered(claim, Status.RECOVERABLE)
            else:
                result.completed += 1
        except OutcomeUnknownError:
            result.parked += 1
        except InProgressError:
            result.postponed += 1
        except IdempotencyError:
            logger.exception("Operation %r: a finding could not be recorded", operation.name)
            result.postponed += 1


def describe(result: RecoveryResult) -> dict[str, Any]:
    """The counts as plain data, as a task's result or a command's report."""
    return {
        "recoverable": result.recoverable,
        "completed": result.completed,
        "parked": result.parked,
        "postponed": result.postponed,
        "unknown_operations": dict(result.unknown_operations),
    }
