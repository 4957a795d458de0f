"""What a person may decide about a record, as functions: the admin's actions call them, and a script may.

Each is one compare-and-set on the state that the person looked at: the whole scope, the row, the attempt, the status.
Of two people who decide at once one wins, and the other is told what the record has become. Each leaves a line in the
log ``idempotency.audit``, and an entry in the admin's own log where there is one and a user decided; the entry and the
decision are committed together.

What nobody can decide is whether a call that is still under way will arrive. "It did not happen" has to mean that it
will not happen any more either: a worker that was frozen may wake, and no fence can hold its call to the outside world.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.models import DateTimeField, ExpressionWrapper, F, Q, Value
from django.db.models.functions import Greatest, Now
from django.http.response import HttpResponseBase

from .. import signals
from ..exceptions import IdempotencyError
from ..identity.keys import shorten
from ..lifecycle import Recovery, Status
from ..models import IdempotencyRecord
from ..operation import Operation, registry
from ..outcome import Outcome, outcome_of, outcome_of_result
from ..protocol.transactions import alias
from . import audit


class ResolutionRefusedError(IdempotencyError):
    """The record is not, or not any more, in a state in which this can be decided. Nothing was changed."""

    status_code = 409
    code = "idempotency_resolution_refused"
    title = "Record can't be resolved"


def mark_not_executed(record: IdempotencyRecord, *, by: Any, reason: str = "") -> None:
    """Say of a parked record that the operation did not take effect: it is recoverable, and a retry runs it.

    If that is wrong, or a late call still arrives, the retry's effect is a second one. Results of steps that were
    stored stay, and the retry skips those steps.

    :param record: as the decision was made on it. It is not changed; read it again.
    :param by: who decides, for the audit: a user, or a name (str).
    :raises ResolutionRefusedError: the record is not parked, or has changed since it was read.
    """
    _resolve(record, Status.RECOVERABLE, "marked not executed", by, reason, allowed={Status.PARKED})


def record_outcome(record: IdempotencyRecord, response_or_result: Any, *, by: Any, reason: str = "") -> None:
    """Say of a parked record that the operation took effect, and how: every retry is answered with that.

    :param response_or_result: the ``HttpResponse`` that retries get, of a status that the operation records; or, for a
        ``claim()`` block, its JSON result.
    :param by: who decides, for the audit: a user, or a name (str).
    :raises ResolutionRefusedError: the record is not parked, or has changed since it was read.
    :raises ImproperlyConfigured: no operation of the record's name is declared in this process, so it can't be said
        what may be recorded for it.
    :raises ValueError: a response of this status is not an outcome of the operation.
    :raises UnrecordableResponseError: the response is a stream, or larger than the operation's ``max_body``.
    :raises TypeError: the result is not JSON.
    """
    operation = registry.get(record.operation)
    if operation is None:
        raise ImproperlyConfigured(
            f"No operation {record.operation!r} is declared in this process, so it is not known what may be recorded "
            f"as its outcome. Declare it in an app's operations.py."
        )
    outcome = _outcome(response_or_result, operation)
    _resolve(
        record,
        Status.COMPLETED,
        f"recorded outcome {outcome.status}",
        by,
        reason,
        allowed={Status.PARKED},
        completed_at=Now(),
        # Retries have the whole retention from now, however long the record was parked.
        expires_at=Greatest(F("expires_at"), ExpressionWrapper(Now() + Value(operation.ttl), DateTimeField())),
        response_status=outcome.status,
        response_headers=outcome.headers,
        response_body=outcome.body,
        response_reference=outcome.reference,
    )


def release(record: IdempotencyRecord, *, by: Any, reason: str = "", force: bool = False) -> None:
    """Free an abandoned claim or a parked record, so that a retry runs the operation at once.

    A claim that is freed gets the next attempt number, so its owner, should it live after all, has lost its lease: its
    renewals and its outcome match nothing.

    ``force=True`` frees a live claim too, but only of an operation that declares REEXECUTE. There running again is
    safe: with ``transaction=True`` the owner's writes roll back with its outcome, and an owner whose completing update
    has run already is left to commit; with ``transaction=False`` every effect carries a derived key, by the operation's
    declaration. Of any other operation nobody can say that a live owner will not have its effect later, so its lease
    has to end first. Then releasing it says what ``mark_not_executed`` says, in place of what the operation declares.

    :param record: as the decision was made on it. It is not changed; read it again.
    :param by: who decides, for the audit: a user, or a name (str).
    :raises ResolutionRefusedError: the record is neither claimed nor parked, or has changed since it was read; or its
        claim is alive and may not be forced.
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


def _outcome(response_or_result: Any, operation: Operation) -> Outcome:
    if not isinstance(response_or_result, HttpResponseBase):
        return outcome_of_result(response_or_result, operation)
    response: Any = response_or_result
    if hasattr(response, "render") and not response.is_rendered:
        response = response.render()
    if not operation.recordable(response.status_code):
        raise ValueError(
            f"A response of status {response.status_code} is not an outcome of operation {operation.name!r}: a retry "
            f"of such a response runs again. Mark the record as not executed, if that is so."
        )
    return outcome_of(response, operation)


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
    audit.require_name(by)
    if Status(record.status) not in allowed:
        raise ResolutionRefusedError(f"{_describe(record)} is {_state(record)}, which leaves nothing to decide.")
    using = alias()
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
    # In a transaction of the caller's, if there is one, such as an admin's under ATOMIC_REQUESTS: unlike a claim, a
    # decision is not waited for by anybody.
    with transaction.atomic(using=using):
        changeable = seen
        if connections[using].features.has_select_for_update_skip_locked:
            # Who holds the row's lock is settling it right now, or is frozen in the act. Either way it is no time for
            # a decision, and a person is told so at once.
            free_rows = seen.select_for_update(skip_locked=True)
            changeable = seen.filter(pk__in=list(free_rows.values_list("pk", flat=True)))
        if changeable.update(status=status, lease_expires_at=None, **changes) != 1:
            raise _refusal(record, using, may_be_alive=free is None)
        # Without the account: the entry stays when the account's records are erased.
        audit.enter(record, f"{record.operation}, attempt {record.attempt}", verb, by, reason)
        transaction.on_commit(lambda: _announce(record, status, verb, by, reason), using=using, robust=True)


def _announce(record: IdempotencyRecord, status: Status, verb: str, by: Any, reason: str) -> None:
    audit.note(f"{_describe(record)}, {_state(record)} to {status}", verb, by, reason)
    scope = record.scope
    signals.send(signals.recovered, registry.get(record.operation), scope, record.attempt, status=str(status))


def _refusal(record: IdempotencyRecord, using: str, *, may_be_alive: bool) -> ResolutionRefusedError:
    """Why the compare-and-set matched nothing, as far as another look can tell."""
    found = IdempotencyRecord.objects.using(using).filter(account_id=record.account_id, pk=record.pk)
    now = found.first()
    if now is None:
        return ResolutionRefusedError(f"{_describe(record)} is gone: it was purged.")
    if (now.attempt, now.status) != (record.attempt, record.status):
        return ResolutionRefusedError(
            f"{_describe(record)} is {_state(now)} by now; it was {_state(record)} when it was decided on. Nothing was "
            f"changed."
        )
    if not may_be_alive and found.filter(status=Status.IN_PROGRESS, lease_expires_at__gt=Now()).exists():
        return ResolutionRefusedError(
            f"{_describe(record)} is {_state(now)} and its lease is running: its owner may be alive and have its "
            f"effect yet. Wait until {now.lease_expires_at:%Y-%m-%d %H:%M:%S %Z}. Only an operation that declares "
            f"REEXECUTE can be released before that, by force."
        )
    return ResolutionRefusedError(f"{_describe(record)} is being settled by somebody else this moment. Look again.")


def _describe(record: IdempotencyRecord) -> str:
    return f"Record {record.pk} (operation {record.operation!r}, key {shorten(record.idempotency_key)})"


def _state(record: IdempotencyRecord) -> str:
    return f"{record.status.replace('_', ' ')}, attempt {record.attempt}"
