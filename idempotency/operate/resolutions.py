"""The decisions that a person may make about a record. The admin's actions call these functions, and a script may too.

Each decision is one compare-and-set on the state that the person looked at. If two people decide at once, one wins and
the other gets an error that names the record's new state. Each decision writes a line to the log ``idempotency.audit``.
If a user decided and the admin is installed, it also adds an entry to the admin's log, in the same transaction.

A person who says "it did not happen" must also know that it can't happen later. A worker that was frozen may wake, and
no fence can stop its call to the outside world.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Greatest, Now
from django.http.response import HttpResponseBase

from .. import signals
from ..exceptions import IdempotencyError
from ..identity.keys import shorten
from ..lifecycle import Recovery, Status
from ..models import IdempotencyRecord
from ..operation import Policy, registry
from ..outcome import Outcome, outcome_of, outcome_of_result
from ..store import from_now, records_database, store_for
from . import decision_log


class ResolutionRefusedError(IdempotencyError):
    """This decision is not possible in the record's state, or the record has changed since. Nothing was changed."""

    status_code = 409
    code = "idempotency_resolution_refused"
    title = "Record can't be resolved"


def mark_not_executed(record: IdempotencyRecord, *, by: Any, reason: str = "") -> None:
    """Decide that the operation of a parked record did not take effect: the next retry runs it.

    If that is wrong, or if a late call still arrives, the retry takes effect a second time. Stored results of steps are
    kept, and the retry skips those steps.

    :param record: the record as the person saw it. The instance is not changed; read it again.
    :param by: who decides, for the audit: a user, or a name (str).
    :param reason: why, for the audit.
    :raises ResolutionRefusedError: the record is not parked, or has changed since it was read.
    :raises TypeError: ``by`` does not say who decides.
    """
    _resolve(record, Status.RECOVERABLE, "marked not executed", by, reason, allowed={Status.PARKED})


def record_outcome(record: IdempotencyRecord, response_or_result: Any, *, by: Any, reason: str = "") -> None:
    """Decide that the operation of a parked record took effect, and record its outcome: every retry gets it.

    :param record: the record as the person saw it. The instance is not changed; read it again.
    :param response_or_result: the ``HttpResponse`` that retries get, with a status that the operation records; or, for
        a ``claim()`` block, its JSON result.
    :param by: who decides, for the audit: a user, or a name (str).
    :param reason: why, for the audit.
    :raises ResolutionRefusedError: the record is not parked, or has changed since it was read.
    :raises ImproperlyConfigured: no operation of the record's name is declared in this process, so its
        policy is not known.
    :raises ValueError: the operation does not record a response of this status.
    :raises UnrecordableResponseError: the response is a stream, or larger than the operation's ``max_body``.
    :raises TypeError: the result is not JSON, or ``by`` does not say who decides.
    """
    operation = registry.get(record.operation)
    if operation is None:
        raise ImproperlyConfigured(
            f"No operation {record.operation!r} is declared in this process, so its policy is not "
            f"known here. Declare it in an app's operations.py, or import the module of its task."
        )
    outcome = _outcome(response_or_result, operation.policy)
    # The retention begins now, because the record may have been parked for longer than its retention.
    _resolve(
        record,
        Status.COMPLETED,
        f"recorded outcome {outcome.status}",
        by,
        reason,
        allowed={Status.PARKED},
        completed_at=Now(),
        expires_at=Greatest(F("expires_at"), from_now(operation.policy.ttl)),
        body_expires_at=None if outcome.body_ttl is None else from_now(outcome.body_ttl),
        response_status=outcome.status,
        response_headers=outcome.headers,
        response_body=outcome.body,
        response_reference=outcome.reference,
    )


def release(record: IdempotencyRecord, *, by: Any, reason: str = "", force: bool = False) -> None:
    """Release an abandoned claim or a parked record, so that a retry runs the operation at once.

    A released claim gets the next attempt number. If its owner is alive after all, it has lost its lease: its renewals
    and its outcome match no row.

    With ``force=True`` a live claim is released too, but only if the operation declares REEXECUTE. For such an
    operation it is safe to run again. With ``transaction=True`` the owner's writes roll back together with its outcome;
    if the owner's completing update has already run, this function refuses and the owner may commit. With
    ``transaction=False`` the operation has declared that every effect carries a derived key.

    A live owner of any other operation may still take effect later, so its lease has to end first. After that,
    releasing the claim means the same as ``mark_not_executed``, for every declared recovery.

    :param record: the record as the person saw it. The instance is not changed; read it again.
    :param by: who decides, for the audit: a user, or a name (str).
    :param reason: why, for the audit.
    :param force: release a live claim, too.
    :raises ResolutionRefusedError: the record is neither claimed nor parked, or has changed since it was read; or its
        claim is live and may not be released by force.
    :raises TypeError: ``by`` does not say who decides.
    """
    operation = registry.get(record.operation)
    forced = force and operation is not None and operation.recovery is Recovery.REEXECUTE
    verb = "released by force" if force else "released"
    changes: dict[str, Any] = {}
    free: Q | None = None
    if record.status == Status.IN_PROGRESS:
        changes["attempt"] = F("attempt") + 1
        if not forced:
            free = Q(lease_expires_at__lte=Now())
    _resolve(
        record, Status.RECOVERABLE, verb, by, reason, allowed={Status.PARKED, Status.IN_PROGRESS}, free=free, **changes
    )


def _outcome(response_or_result: Any, policy: Policy) -> Outcome:
    if not isinstance(response_or_result, HttpResponseBase):
        return outcome_of_result(response_or_result, policy)
    response: Any = response_or_result
    if hasattr(response, "render") and not response.is_rendered:
        response = response.render()
    if not policy.recordable(response.status_code):
        raise ValueError(
            f"A response of status {response.status_code} is not an outcome of operation {policy.operation.name!r}: "
            f"after such a response a retry runs again. If the operation did not take effect, mark the record as not "
            f"executed instead."
        )
    return outcome_of(response, policy)


def _resolve(
    record: IdempotencyRecord,
    status: Status,
    verb: str,
    by: Any,
    reason: str,
    *,
    allowed: set[Status],
    free: Q | None = None,
    **changes: Any,
) -> None:
    decision_log.require_name(by)
    if record.status not in allowed:
        raise ResolutionRefusedError(
            f"{_describe(record)} is {_state(record)}. This decision is not possible in that state."
        )
    using = records_database(operation=record.operation, account_id=record.account_id)
    seen = IdempotencyRecord.objects.using(using).filter(
        free or Q(),
        account_id=record.account_id,
        operation=record.operation,
        idempotency_key=record.idempotency_key,
        pk=record.pk,
        attempt=record.attempt,
        request_hash=record.request_hash,
        status=record.status,
    )
    # This may run inside a transaction of the caller, such as the admin's under ATOMIC_REQUESTS. A claim may not,
    # because other requests have to see it at once.
    with transaction.atomic(using=using):
        # If another transaction has locked the row, it is settling the record now, or it is frozen while doing so. In
        # both cases the decision is refused at once, so that the person doesn't wait for the lock.
        changeable = store_for(using).select_unlocked(seen.values_list("pk", flat=True))
        if seen.filter(pk__in=changeable).update(status=status, lease_expires_at=None, **changes) != 1:
            raise _refusal(record, using, may_be_alive=free is None)
        # The entry does not name the account, because it stays when the account's records are erased.
        title = f"{record.operation}, attempt {record.attempt}"
        subject = f"{_describe(record)}, {_state(record)} to {status}"
        decision_log.record(record, subject, title, verb, by, reason, using=using)
        operation = registry.get(record.operation)
        announcement = (signals.recovered, operation, record.scope, record.attempt)
        transaction.on_commit(lambda: signals.send(*announcement, status=str(status)), using=using, robust=True)


def _refusal(record: IdempotencyRecord, using: str, *, may_be_alive: bool) -> ResolutionRefusedError:
    """Read the record again to say why the compare-and-set matched no row."""
    same_row = IdempotencyRecord.objects.using(using).filter(account_id=record.account_id, pk=record.pk)
    now = same_row.first()
    if now is None:
        return ResolutionRefusedError(f"{_describe(record)} is gone: it was purged.")
    if (now.attempt, now.status) != (record.attempt, record.status):
        return ResolutionRefusedError(
            f"{_describe(record)} is {_state(now)} by now; it was {_state(record)} when you looked at it. Nothing was "
            f"changed. Decide again if its state still asks for it."
        )
    if not may_be_alive and same_row.filter(status=Status.IN_PROGRESS, lease_expires_at__gt=Now()).exists():
        return ResolutionRefusedError(
            f"{_describe(record)} is {_state(now)} and its lease is running: its owner may be alive and may still take "
            f"effect. Wait until {now.lease_expires_at:%Y-%m-%d %H:%M:%S %Z}. Only an operation that declares "
            f"REEXECUTE can be released before that, by force."
        )
    return ResolutionRefusedError(
        f"{_describe(record)} is being settled by another process at this moment. Look at it again."
    )


def _describe(record: IdempotencyRecord) -> str:
    return f"Record {record.pk} (operation {record.operation!r}, key {shorten(record.idempotency_key)})"


def _state(record: IdempotencyRecord) -> str:
    return f"{record.status.replace('_', ' ')}, attempt {record.attempt}"
