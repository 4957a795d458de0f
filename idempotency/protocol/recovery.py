"""Recovery: what is done about a claim whose process has disappeared, as its operation declares.

A retry that meets such a claim settles it on the spot (``execution.acquire_or_wait``). A sweep settles those that
nobody retries. Both come through ``settle``. Everything here may be killed anywhere and simply run again: what it has
changed is fenced, and what it has not is found again.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.db import DatabaseError, InterfaceError
from django.http.response import HttpResponseBase

from .. import signals
from ..conf import settings
from ..exceptions import IdempotencyError, InProgressError, LeaseLostError, OutcomeUnknownError, UnavailableError
from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..outcome import Outcome, outcome_of, outcome_of_result
from ..policy import Completed, NotExecuted, Unknown
from . import claims
from .claims import Claim
from .faults import fault_point

logger = logging.getLogger("idempotency")

#: An unknown outcome is asked for again after 2, 4, 8 … seconds: soon enough for a provider that is a little late, and
#: at a pace that a provider in trouble can bear.
LONGEST_BACKOFF = 256


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
    fault_point("reconcile.before")
    finding = _ask(claim)
    fault_point("reconcile.found")
    if isinstance(finding, NotExecuted):
        # True of the moment it was found. If the reconciler took longer than its lease, another one may have asked
        # since, and run the operation; what runs now must own the record, and has a whole lease for it.
        if not claims.renew(claim):
            raise InProgressError(retry_after=1)
        claim.abandoned = False
        return None
    if isinstance(finding, Completed):
        outcome = _outcome_found(finding, claim)
        if outcome is not None:
            _record(claim, outcome)
            announce_recovery(claim, Status.COMPLETED)
            return outcome
    try:
        if claim.attempt >= reconcile.max_attempts:
            if not claims.park(claim):
                raise InProgressError(retry_after=1)  # this reconciler was slow, and another one took over
            signals.send(signals.parked, claim.operation, claim.scope, claim.attempt)
            announce_recovery(claim, Status.PARKED)
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
    except Exception:  # the project's code may raise anything, and then it has said nothing of the outcome
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


def announce_recovery(claim: Claim, status: Status) -> None:
    signals.send(signals.recovered, claim.operation, claim.scope, claim.attempt, status=str(status))
