"""Recovery: what is done about a claim whose process has disappeared, as its operation declares.

A retry that meets such a claim settles it on the spot (``execution.acquire_or_wait``). A sweep settles those that
nobody retries. Both come through ``reconcile``. Everything here may be killed anywhere and simply run again: what it
has changed is fenced, and what it has not is found again.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.http.response import HttpResponseBase

from .. import signals
from ..conf import settings
from ..exceptions import IdempotencyError, InProgressError, LeaseLostError, OutcomeUnknownError
from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..options.values import Completed, NotExecuted, Unknown
from ..outcome import Outcome, outcome_of, outcome_of_result
from . import claims
from .faults import fault_point
from .ownership import Ownership
from .renewal import renew
from .transactions import store_errors

logger = logging.getLogger("idempotency")

#: An unknown outcome is asked for again after 2, 4, 8 … seconds: soon enough for a provider that is a little late, and
#: at a pace that a provider in trouble can bear.
LONGEST_BACKOFF = 256


def reconcile(owned: Ownership) -> Outcome | None:
    """Ask the operation's reconciler what became of the attempts before this one.

    :returns: the outcome, now recorded; or None: it was not executed, and this claim may run it.
    :raises InProgressError: nobody can say yet, or another reconciler took over from a slow one.
    :raises OutcomeUnknownError: nobody could say often enough, and the record is parked.
    :raises UnavailableError: the finding could not be recorded. It is asked for again when the lease is over.
    """
    # If the process dies in here, or before the finding is recorded, the lease runs out and the next one asks again. If
    # it sleeps in here until another one took over, what it records is fenced on its attempt.
    fault_point("reconcile.before")
    finding = _ask(owned)
    fault_point("reconcile.found")
    if isinstance(finding, NotExecuted):
        # True of the moment it was found. If the reconciler took longer than its lease, another one may have asked
        # since, and run the operation; what runs now must own the record, and has a whole lease for it.
        if not renew(owned):
            raise InProgressError(retry_after=1)
        owned.abandoned = False
        return None
    if isinstance(finding, Completed):
        outcome = _outcome_found(finding, owned)
        if outcome is not None:
            _record(owned, outcome)
            announce_recovery(owned, Status.COMPLETED)
            return outcome
    with store_errors(owned.using):
        if owned.attempt >= owned.operation.reconcile.max_attempts:
            if not claims.park(owned):
                raise InProgressError(retry_after=1)  # this reconciler was slow, and another one took over
            signals.send(signals.parked, owned.operation, owned.scope, owned.attempt)
            announce_recovery(owned, Status.PARKED)
            raise OutcomeUnknownError
        backoff = min(2**owned.attempt, LONGEST_BACKOFF)
        claims.postpone(owned, timedelta(seconds=backoff))
    raise InProgressError(retry_after=min(backoff, int(settings.max_retry_after.total_seconds()) or 1))


def _record(owned: Ownership, outcome: Outcome) -> None:
    try:
        claims.record(owned, outcome)
    except LeaseLostError as error:
        raise InProgressError(retry_after=1) from error


def _ask(owned: Ownership) -> Completed | NotExecuted | Unknown:
    operation = owned.operation
    found = IdempotencyRecord.objects.using(owned.using).filter(account_id=owned.scope.account_id, pk=owned.record_id)
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


def _outcome_found(finding: Completed, owned: Ownership) -> Outcome | None:
    """None where what the reconciler found can't be recorded: an outcome that can't be replayed is not known."""
    try:
        if isinstance(finding.response, HttpResponseBase):
            return outcome_of(finding.response, owned.operation)
        return outcome_of_result(finding.response, owned.operation)
    except (IdempotencyError, TypeError):
        logger.exception("The reconciler of operation %r found what can't be recorded", owned.operation.name)
        return None


def announce_recovery(owned: Ownership, status: Status) -> None:
    signals.send(signals.recovered, owned.operation, owned.scope, owned.attempt, status=str(status))
