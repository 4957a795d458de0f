"""Recovery: calls a reconciler to find out how a claim ended whose process has disappeared.

A retry settles the claim that it finds, and a sweep settles claims without a retry. Both use ``reconcile``. It may be
killed at any point and run again: its changes are fenced, and a claim that it did not change is found again.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final

from django.http.response import HttpResponseBase

from .. import signals
from ..conf import settings
from ..exceptions import IdempotencyError, InProgressError, LeaseLostError, OutcomeUnknownError
from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..options.values import Completed, NotExecuted, Unknown
from ..outcome import Outcome, outcome_of, outcome_of_result
from . import ownership
from .faults import fault_point
from .ownership import Ownership, store_errors
from .renewal import renew

logger: Final = logging.getLogger("idempotency")

#: After an ``Unknown`` the reconciler is called again after 2, 4, 8 … seconds, up to this. That is soon enough for a
#: provider with a short delay, and rare enough not to burden a provider in trouble.
LONGEST_BACKOFF = 256


def reconcile(owned: Ownership) -> Outcome | None:
    """Call the operation's reconciler to find out how the earlier attempts ended.

    :returns: the outcome, which is now recorded; or None if the operation was not executed and this claim may run it.
    :raises InProgressError: the reconciler returned ``Unknown``, or it was slow and another attempt has taken over.
    :raises OutcomeUnknownError: the reconciler returned ``Unknown`` too often, and the record is parked.
    :raises UnavailableError: the finding could not be recorded. The reconciler is called again when the lease is over.
    """
    # If the process dies here, or before the finding is recorded, the lease runs out and the next attempt calls the
    # reconciler again. If it sleeps here until another attempt has taken over, its changes match no row.
    fault_point["reconcile.before"]()
    finding = _call_reconciler(owned)
    fault_point["reconcile.found"]()
    if isinstance(finding, NotExecuted):
        # The finding was true when it was made. If the reconciler took longer than its lease, another attempt may since
        # have called it and run the operation. So prove ownership again. This also gives the operation a whole lease.
        if not renew(owned):
            raise InProgressError(retry_after=1)
        return None
    if isinstance(finding, Completed):
        outcome = _outcome_found(finding, owned)
        if outcome is not None:
            try:
                ownership.record(owned, outcome)
            except LeaseLostError as error:
                raise InProgressError(retry_after=1) from error
            announce_recovery(owned, Status.COMPLETED)
            return outcome
    with store_errors(owned.using):
        if owned.attempt >= owned.policy.operation.reconcile.max_attempts:
            if not ownership.park(owned):
                raise InProgressError(retry_after=1)  # this reconciler was slow, and another attempt took over
            signals.send(signals.parked, owned.policy.operation, owned.scope, owned.attempt)
            announce_recovery(owned, Status.PARKED)
            raise OutcomeUnknownError
        backoff = min(2**owned.attempt, LONGEST_BACKOFF)
        ownership.postpone(owned, timedelta(seconds=backoff))
    raise InProgressError(retry_after=min(backoff, int(settings().max_retry_after.total_seconds()) or 1))


def _call_reconciler(owned: Ownership) -> Completed | NotExecuted | Unknown:
    operation = owned.policy.operation
    found = IdempotencyRecord.objects.using(owned.using).filter(account_id=owned.scope.account_id, pk=owned.fence.id)
    try:
        finding: object = operation.reconcile.find_out(found.get())
    except Exception:  # the project's code may raise anything; the outcome is still unknown
        logger.exception("The reconciler of %s failed; the outcome stays unknown", owned.scope)
        return Unknown()
    if not isinstance(finding, (Completed, NotExecuted, Unknown)):
        logger.error(
            "The reconciler of %s must return Completed(response), NotExecuted() or Unknown(), not %s",
            owned.scope,
            type(finding).__name__,
        )
        return Unknown()
    return finding


def _outcome_found(finding: Completed, owned: Ownership) -> Outcome | None:
    """The outcome from the reconciler's response. None if it can't be recorded, which counts as ``Unknown``."""
    try:
        if isinstance(finding.response, HttpResponseBase):
            return outcome_of(finding.response, owned.policy)
        return outcome_of_result(finding.response, owned.policy)
    except (IdempotencyError, TypeError):
        logger.exception("The reconciler of %s returned a response that can't be recorded", owned.scope)
        return None


def announce_recovery(owned: Ownership, status: Status) -> None:
    signals.send(signals.recovered, owned.policy.operation, owned.scope, owned.attempt, status=str(status))
