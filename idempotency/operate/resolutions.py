"""Operators' decisions about a record, and their log. Called by the admin and by scripts.

Each decision is one compare-and-set on the state that the operator saw. If two operators decide at once, one wins, and
the other gets an error that names the new state. After its COMMIT, a decision is logged to ``idempotency.audit``. If a
user of ``AUTH_USER_MODEL`` decided and the admin is installed, the same transaction adds an entry to the admin's log.

An operator who decides that an operation did not take effect must also know that it can't take effect later: a frozen
worker may wake up, and no fence can stop its call to an external service.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import F, Model, Q
from django.db.models.functions import Greatest
from django.http.response import HttpResponseBase

from .. import signals
from ..exceptions import IdempotencyError
from ..identity.keys import shorten
from ..lifecycle import Status
from ..models import IdempotencyRecord, Now
from ..operation import Policy, registry
from ..outcome import Outcome, outcome_of, outcome_of_result
from ..store import Fence, from_now, records_database, upkeep_for

logger: Final = logging.getLogger("idempotency.audit")


class ResolutionRefusedError(IdempotencyError):
    """The decision is not possible in the record's state, or the record has changed since. Nothing was changed."""

    status_code = 409
    code = "idempotency_resolution_refused"
    title = "Record can't be resolved"


def mark_not_executed(record: IdempotencyRecord, *, by: Any, reason: str = "") -> None:
    """Decide that the operation of a parked record did not take effect: the next retry runs it.

    If that is wrong, or if a late call still arrives, it takes effect twice. The retry skips steps with stored results.

    :param record: the record as the operator saw it. The instance is not changed; read it again.
    :param by: the operator, for the audit: a user, or a name (str).
    :param reason: the reason, for the audit.
    :raises ResolutionRefusedError: the record is not parked, or has changed since it was read.
    :raises TypeError: ``by`` is neither a user nor a non-empty str.
    """
    _resolve(record, Status.RECOVERABLE, "marked not executed", by, reason)


def record_outcome(record: IdempotencyRecord, response_or_result: Any, *, by: Any, reason: str = "") -> None:
    """Decide that the operation of a parked record took effect, and record the outcome that every retry gets.

    Takes the other arguments of ``mark_not_executed`` and raises its errors.

    :param response_or_result: an ``HttpResponse`` with a status that the operation records or, for a ``claim()`` block,
        its JSON result.
    :raises ImproperlyConfigured: the record's operation is not declared in this process.
    :raises ValueError: the operation does not record a response of this status.
    :raises UnrecordableResponseError: the response is a stream, or larger than the operation's ``max_response_body``.
    :raises TypeError: the result is not JSON.
    """
    operation = registry.get(record.operation)
    if operation is None:
        raise ImproperlyConfigured(
            f"Operation {record.operation!r} is not declared in this process. Declare it in an app's operations.py, or "
            f"import the module of its task."
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


def release(record: IdempotencyRecord, *, by: Any, reason: str = "") -> None:
    """Release an abandoned claim or a parked record, so that the next retry runs the operation.

    For every declared recovery, this means the same as ``mark_not_executed``. A released claim gets the next attempt
    number: if its owner is alive after all, it has lost its lease, and its renewals and its outcome match no row. A
    live claim can't be released, because its owner may still take effect.

    Takes the arguments of ``mark_not_executed``.

    :raises ResolutionRefusedError: the record is neither claimed nor parked, or has changed since it was read; or the
        claim is live.
    :raises TypeError: ``by`` is neither a user nor a non-empty str.
    """
    if record.status != Status.IN_PROGRESS:
        return _resolve(record, Status.RECOVERABLE, "released", by, reason)
    is_over = Q(lease_expires_at__lte=Now())
    return _resolve(
        record, Status.RECOVERABLE, "released", by, reason, Status.IN_PROGRESS, free=is_over, attempt=F("attempt") + 1
    )


def forget(record: IdempotencyRecord, *, by: Any, reason: str = "") -> None:
    """End the retention of a completed record, so that the operation runs again.

    The next request with the key runs as a new request, even with another payload. It deletes stored results of steps,
    and its messages get new ids, so consumers also run again. If the first run took effect, this is a second effect.
    Keys derived for downstream calls stay the same. An operation with ``max_key_age`` still rejects an older key.

    Takes the arguments of ``mark_not_executed``.

    :raises ResolutionRefusedError: the record is not completed, has changed since it was read, or is past its
        retention.
    :raises TypeError: ``by`` is neither a user nor a non-empty str.
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
            f"Operation {policy.operation.name!r} does not record responses of status {response.status_code}: a retry "
            f"runs again. If the operation did not take effect, mark the record as not executed instead."
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
            f"{_describe(record)} is {_state(record)}. The decision is not possible in this state."
        )
    using = records_database(operation=record.operation, account_id=record.account_id)
    upkeep = upkeep_for(using)
    seen = upkeep.store.matching(Fence.of(record), status=record.status).filter(free)
    # Unlike a claim, which must be visible to other requests at once, this may run inside the caller's transaction,
    # such as the admin's under ATOMIC_REQUESTS.
    with transaction.atomic(using=using):
        # A transaction that locked the row is settling the record, or froze while doing so. Don't wait for it: refuse
        # the decision at once.
        changeable = upkeep.select_unlocked(seen.values_list("pk", flat=True))
        if seen.filter(pk__in=changeable).update(status=status, lease_expires_at=None, **changes) != 1:
            raise _refusal(record, using, must_be_free=bool(free))
        # The entry survives the erasure of the account, so it does not name the account.
        title = f"{record.operation}, attempt {record.attempt}"
        settled = "" if status == record.status else f" to {status}"
        subject = f"{_describe(record)}, {_state(record)}{settled}"
        log_decision(record, subject, title, verb, by, reason, using=using)
        if settled:
            announcement = (signals.recovered, registry.get(record.operation), record.scope, record.attempt)
            transaction.on_commit(lambda: signals.send(*announcement, status=str(status)), using=using, robust=True)


def _refusal(record: IdempotencyRecord, using: str, *, must_be_free: bool) -> ResolutionRefusedError:
    """Read the record again to explain why the compare-and-set matched no row."""
    same_row = IdempotencyRecord.objects.using(using).filter(account_id=record.account_id, pk=record.pk)
    now = same_row.first()
    if now is None:
        return ResolutionRefusedError(f"{_describe(record)} has been purged.")
    if (now.attempt, now.status) != (record.attempt, record.status):
        return ResolutionRefusedError(
            f"{_describe(record)} is now {_state(now)}; it was {_state(record)} when it was shown. Nothing was changed."
        )
    if must_be_free and same_row.filter(status=Status.IN_PROGRESS, lease_expires_at__gt=Now()).exists():
        return ResolutionRefusedError(
            f"{_describe(record)} is {_state(now)} and its lease is running: its owner may still take effect. Wait "
            f"until {now.lease_expires_at:%Y-%m-%d %H:%M:%S %Z}."
        )
    if same_row.completed().past_retention().exists():
        return ResolutionRefusedError(
            f"{_describe(record)} is past its retention, so the next request with its key runs anyway."
        )
    return ResolutionRefusedError(f"{_describe(record)} is being settled by another process. Check it again.")


def _describe(record: IdempotencyRecord) -> str:
    return f"Record {record.pk} (operation {record.operation!r}, key {shorten(record.idempotency_key)})"


def _state(record: IdempotencyRecord) -> str:
    return f"{record.status.replace('_', ' ')}, attempt {record.attempt}"


def require_name(by: Any) -> None:
    """:raises TypeError: ``by`` is neither a user nor a non-empty str."""
    if not isinstance(by, Model) and not (isinstance(by, str) and by):
        raise TypeError(f"by= must be a user or a non-empty str, not {by!r}.")


def log_decision(row: Model, subject: str, title: str, decision: str, by: Any, reason: str, *, using: str) -> None:
    """Log a decision in its transaction: a log line, and an entry in the admin's log.

    :param subject: the row, for the line, without control characters.
    :param title: the row, for the entry.
    """

    def write_line() -> None:
        # The name and the reason are free text. repr() escapes them, so that they can't break or forge a log line.
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
