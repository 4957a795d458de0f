"""The decisions that a person may make about a record, and the log of decisions. The admin calls these functions, and a
script may too.

Each decision is one compare-and-set on the state that the person looked at. If two people decide at once, one wins and
the other gets an error that names the record's new state. Each decision writes a line to the log ``idempotency.audit``
after its COMMIT. If a user of ``AUTH_USER_MODEL`` decided and the admin is installed, it also adds an entry to the
admin's log, in the same transaction.

A person who says "it did not happen" must also know that it can't happen later. A worker that was frozen may wake, and
no fence can stop its call to the outside world.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import F, Model, Q
from django.db.models.functions import Greatest, Now
from django.http.response import HttpResponseBase

from .. import signals
from ..exceptions import IdempotencyError
from ..identity.keys import shorten
from ..lifecycle import Recovery, Status
from ..models import IdempotencyRecord
from ..operation import Policy, registry
from ..outcome import Outcome, outcome_of, outcome_of_result
from ..store import Fence, from_now, records_database, store_for

logger: Final = logging.getLogger("idempotency.audit")


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
    _resolve(record, Status.RECOVERABLE, "marked not executed", by, reason)


def record_outcome(record: IdempotencyRecord, response_or_result: Any, *, by: Any, reason: str = "") -> None:
    """Decide that the operation of a parked record took effect, and record its outcome: every retry gets it.

    Takes ``record``, ``by`` and ``reason`` as ``mark_not_executed`` does, and raises the same errors.

    :param response_or_result: the ``HttpResponse`` that retries get, with a status that the operation records; or, for
        a ``claim()`` block, its JSON result.
    :raises ImproperlyConfigured: no operation of the record's name is declared in this process.
    :raises ValueError: the operation does not record a response of this status.
    :raises UnrecordableResponseError: the response is a stream, or larger than the operation's ``max_response_body``.
    :raises TypeError: the result is not JSON.
    """
    operation = registry.get(record.operation)
    if operation is None:
        raise ImproperlyConfigured(
            f"No operation {record.operation!r} is declared in this process, so its policy is not known here. Declare "
            f"it in an app's operations.py, or import the module of its task."
        )
    outcome = _outcome(response_or_result, operation.policy)
    # The retention begins now, because the record may have been parked for longer than its retention.
    _resolve(
        record,
        Status.COMPLETED,
        f"recorded outcome {outcome.status}",
        by,
        reason,
        completed_at=Now(),
        expires_at=Greatest(F("expires_at"), from_now(operation.policy.retention)),
        body_expires_at=None if outcome.body_retention is None else from_now(outcome.body_retention),
        response_status=outcome.status,
        response_headers=outcome.headers,
        response_body=outcome.body,
        response_reference=outcome.reference,
    )


def release(record: IdempotencyRecord, *, by: Any, reason: str = "", force: bool = False) -> None:
    """Release an abandoned claim or a parked record, so that a retry runs the operation at once.

    A released claim gets the next attempt number. If its owner is alive after all, it has lost its lease: its renewals
    and its outcome match no row.

    With ``force=True`` a live claim is released too, but only if the operation declares REEXECUTE, so that it is safe
    to run again: the owner's writes roll back together with its outcome, or carry derived keys. If the owner's
    completing update has already run, this function refuses and the owner may commit.

    A live owner of any other operation may still take effect later, so its lease has to end first. After that,
    releasing the claim means the same as ``mark_not_executed``, for every declared recovery.

    Takes the other arguments as ``mark_not_executed`` does.

    :param force: release a live claim, too.
    :raises ResolutionRefusedError: the record is neither claimed nor parked, or has changed since it was read; or its
        claim is live and may not be released by force.
    :raises TypeError: ``by`` does not say who decides.
    """
    verb = "released by force" if force else "released"
    if record.status != Status.IN_PROGRESS:
        return _resolve(record, Status.RECOVERABLE, verb, by, reason)
    operation = registry.get(record.operation)
    is_forced = force and operation is not None and operation.recovery is Recovery.REEXECUTE
    free = Q() if is_forced else Q(lease_expires_at__lte=Now())
    return _resolve(
        record, Status.RECOVERABLE, verb, by, reason, Status.IN_PROGRESS, free=free, attempt=F("attempt") + 1
    )


def forget(record: IdempotencyRecord, *, by: Any, reason: str = "") -> None:
    """Decide that a completed operation runs again: the retention of its record ends now.

    The next request with this key runs as a new one, whatever its payload. Stored results of steps are deleted then,
    and messages get other ids, so consumers run again, too. If the first run took effect, this is a second effect. Keys
    that are derived for downstream calls stay the same. An operation with ``max_key_age`` still refuses an older key.

    Takes ``record``, ``by`` and ``reason`` as ``mark_not_executed`` does.

    :raises ResolutionRefusedError: the record is not completed, or has changed since it was read; or its retention is
        over already.
    :raises TypeError: ``by`` does not say who decides.
    """
    within_retention = Q(expires_at__gt=Now())
    _resolve(
        record, Status.COMPLETED, "forgotten", by, reason, Status.COMPLETED, free=within_retention, expires_at=Now()
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
    allowed: Status = Status.PARKED,
    *,
    free: Q = Q(),  # noqa: B008 - it is never changed
    **changes: Any,
) -> None:
    require_name(by)
    if record.status != allowed:
        raise ResolutionRefusedError(
            f"{_describe(record)} is {_state(record)}. This decision is not possible in that state."
        )
    using = records_database(operation=record.operation, account_id=record.account_id)
    store = store_for(using)
    seen = store.matching(Fence.of(record), status=record.status).filter(free)
    # This may run inside a transaction of the caller, such as the admin's under ATOMIC_REQUESTS. A claim may not,
    # because other requests have to see it at once.
    with transaction.atomic(using=using):
        # If another transaction has locked the row, it is settling the record now, or it is frozen while doing so. In
        # both cases the decision is refused at once, so that the person doesn't wait for the lock.
        changeable = store.select_unlocked(seen.values_list("pk", flat=True))
        if seen.filter(pk__in=changeable).update(status=status, lease_expires_at=None, **changes) != 1:
            raise _refusal(record, using, must_be_free=bool(free))
        # The entry does not name the account, because it stays when the account's records are erased.
        title = f"{record.operation}, attempt {record.attempt}"
        settled = "" if status == record.status else f" to {status}"
        subject = f"{_describe(record)}, {_state(record)}{settled}"
        log_decision(record, subject, title, verb, by, reason, using=using)
        if settled:
            announcement = (signals.recovered, registry.get(record.operation), record.scope, record.attempt)
            transaction.on_commit(lambda: signals.send(*announcement, status=str(status)), using=using, robust=True)


def _refusal(record: IdempotencyRecord, using: str, *, must_be_free: bool) -> ResolutionRefusedError:
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
    if must_be_free and same_row.filter(status=Status.IN_PROGRESS, lease_expires_at__gt=Now()).exists():
        return ResolutionRefusedError(
            f"{_describe(record)} is {_state(now)} and its lease is running: its owner may be alive and may still take "
            f"effect. Wait until {now.lease_expires_at:%Y-%m-%d %H:%M:%S %Z}. Only an operation that declares "
            f"REEXECUTE can be released before that, by force."
        )
    if same_row.completed().past_retention().exists():
        return ResolutionRefusedError(
            f"{_describe(record)} is past its retention, so the next request with its key runs anyway. Nothing was "
            f"changed."
        )
    return ResolutionRefusedError(f"{_describe(record)} is being settled by another process now. Look at it again.")


def _describe(record: IdempotencyRecord) -> str:
    return f"Record {record.pk} (operation {record.operation!r}, key {shorten(record.idempotency_key)})"


def _state(record: IdempotencyRecord) -> str:
    return f"{record.status.replace('_', ' ')}, attempt {record.attempt}"


def require_name(by: Any) -> None:
    """:raises TypeError: ``by`` does not say who decides."""
    if not isinstance(by, Model) and not (isinstance(by, str) and by):
        raise TypeError(f"by= must name who decides: a user, or a str that is not empty, not {by!r}.")


def log_decision(row: Model, subject: str, title: str, decision: str, by: Any, reason: str, *, using: str) -> None:
    """Log a decision in the transaction that carries it out: a line, and an entry of the admin's log.

    :param subject: the row, for the line. It has no control characters and no line breaks.
    :param title: the row, for the entry, which the row's history shows.
    """

    def write_line() -> None:
        # People choose the name and the reason freely. repr() escapes them, so they can't break the line or forge one.
        logger.info("%s: %s by %r, reason: %r", subject, decision, str(by), reason)

    transaction.on_commit(write_line, using=using, robust=True)
    if not apps.is_installed("django.contrib.admin") or not isinstance(by, get_user_model()):
        return
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    LogEntry.objects.create(
        user_id=by.pk,
        content_type=ContentType.objects.get_for_model(row),
        object_id=str(row.pk),
        object_repr=title[:200],
        action_flag=CHANGE,
        change_message=f"{decision}: {reason}" if reason else decision,
    )
