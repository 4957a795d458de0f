"""``KeyStatusView``: reports the status of a key to its owner, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views import View

from ..conf import settings
from ..exceptions import IdempotencyError, KeyMissingError
from ..identity import keys
from ..identity.scope import Scope, scope_of
from ..lifecycle import Decision, decide
from ..models import IdempotencyRecord
from ..operation import Operation, Policy, registry
from ..protocol.decisions import retry_after
from ..protocol.ownership import store_errors
from ..store import BY_ITS_CLOCK, records_database, status_of
from .adapter import Adapter
from .key_headers import leave_nothing
from .problems import PROFILES, report

#: The status that a client gets, by the decision about a retry with the same payload.
_STATUS_OF = {
    Decision.WAIT: "in_progress",
    Decision.REPLAY: "completed",
    Decision.TAKE_OVER: "recoverable",
    Decision.RECONCILE: "recoverable",
    Decision.PARK: "parked",
    Decision.REPORT_PARKED: "parked",
}

_FIELDS = (
    *("account_id", "operation", "idempotency_key", "status", "response_status"),
    *("created_at", "completed_at", "expires_at"),
)


@dataclass(frozen=True)
class KeyStatus:
    status: str = "unknown"
    response_status: int | None = None
    created_at: datetime | None = None
    completed_at: datetime | None = None
    expires_at: datetime | None = None
    #: Seconds, if the status is ``in_progress``.
    retry_after: int | None = None


class KeyStatusView(View):
    """Answer ``GET`` with the status of the key in the ``Idempotency-Key`` header, for the caller's account::

        path("keys/", login_required(KeyStatusView.as_view()))
        path("keys/<str:operation>/", login_required(KeyStatusView.as_view()))
        path("charges/key/", login_required(KeyStatusView.as_view(operation="charges.create")))

    The operation's resolver finds the account, so give this view the authentication and permissions of the operation's
    view. Another account's key is unknown, like an unused one. Without an operation, the answer lists all operations
    that used the key, protect views, and leave ``account`` to the project's default. The key is not part of the URL,
    because URLs are logged. For DRF, use the class of the same name in ``contrib.rest_framework``.
    """

    #: The operation, or its name. None takes the name from the URL's argument ``operation``, if there is one.
    operation: str | Operation | None = None

    def get(self, request: HttpRequest, **route: Any) -> HttpResponse:
        policy = queried_policy(self.operation, route)
        response: HttpResponse = status_response(policy, Adapter(request), lambda members: JsonResponse(dict(members)))
        return response


def queried_policy(fixed: str | Operation | None, route: Mapping[str, Any]) -> Policy | None:
    """The policy of the operation to report on, or None for all operations."""
    if isinstance(fixed, Operation):
        return fixed.policy
    name = route.get("operation") if fixed is None else fixed
    if name is None:
        return None
    declared = registry.get(name) if isinstance(name, str) else None
    if declared is not None:
        return declared.policy
    if fixed is None:
        raise Http404("Unknown operation.")
    raise ImproperlyConfigured(f"KeyStatusView.as_view(operation=...) needs a declared operation, not {name!r}.")


def status_response(policy: Policy | None, adapter: Adapter, make: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The response of a status view. ``make`` creates it from its JSON members."""
    meta = adapter.http.META
    adapter.profile = PROFILES[(settings().defaults if policy is None else policy).profile]
    try:
        queried = _queried_scopes(policy, adapter)
        found = key_statuses(queried)
    except IdempotencyError as error:
        report(error, "" if policy is None else policy.operation.name)
        custom = settings().error_response
        response = adapter.answer_to_error(error) if custom is None else custom(adapter.request, error)
    else:
        if policy is None:
            listed = [{"operation": scope.operation, **_members(status)} for scope, status in found.items()]
            response = make({"keys": listed})
        else:
            response = make(_members(next(iter(found.values()), KeyStatus())))
        response[keys.HEADER] = meta[keys.META_NAME]
        waits = [status.retry_after for status in found.values() if status.retry_after is not None]
        if waits:
            response["Retry-After"] = str(min(waits))
    leave_nothing(adapter.http)  # the status of the key is in the body, so the middleware adds none
    response["Cache-Control"] = "no-store"  # because it belongs to one account and may change
    return response


def _queried_scopes(policy: Policy | None, adapter: Adapter) -> dict[Scope, Policy]:
    """The scopes to look up, with the policies of their operations.

    :raises IdempotencyError: the request lacks a key or an account.
    """
    meta = adapter.http.META
    if keys.META_NAME not in meta:
        raise KeyMissingError
    if policy is not None:
        resolver, policies = policy.account, [policy]
    else:
        # Another resolver may return an account that other callers share.
        resolver = settings().defaults.account
        policies = [each.policy for each in registry.of_requests() if each.policy.account is resolver]
    name = "" if policy is None else policy.operation.name
    key = keys.parse_header(meta[keys.META_NAME])
    caller = scope_of(name, resolver(adapter.request), key, source=resolver)
    return {replace(caller, operation=each.operation.name): each for each in policies}


def _members(status: KeyStatus) -> dict[str, Any]:
    times = {name: getattr(status, name) for name in ("created_at", "completed_at", "expires_at")}
    texts = {name: at and at.astimezone(UTC).isoformat().replace("+00:00", "Z") for name, at in times.items()}
    return {"status": status.status, "response_status": status.response_status, **texts}


def key_statuses(requested: Mapping[Scope, Policy]) -> dict[Scope, KeyStatus]:
    """Look up keys of one account, with one query for each database. Unknown keys are left out.

    :raises UnavailableError: the records can't be read.
    """
    by_database: dict[str, list[Scope]] = {}
    for scope in requested:
        using = records_database(operation=scope.operation, account_id=scope.account_id)
        by_database.setdefault(using, []).append(scope)
    found = {}
    for using, scopes in by_database.items():
        records = IdempotencyRecord.objects.using(using).filter(
            account_id=scopes[0].account_id,
            operation__in=[scope.operation for scope in scopes],
            idempotency_key__in={scope.idempotency_key for scope in scopes},
        )
        with store_errors(using):
            for record in records.annotate(**BY_ITS_CLOCK).order_by("created_at", "pk").only(*_FIELDS):
                scope = Scope(record.account_id, record.operation, record.idempotency_key)
                if scope in requested and (status := _status_of_record(record, requested[scope])) is not None:
                    found[scope] = status
    return found


def _status_of_record(record: Any, policy: Policy) -> KeyStatus | None:
    lease_left = (record.lease_left or timedelta(0)).total_seconds()
    decision = decide(
        status_of(record.status),
        lease_over=lease_left <= 0,
        retention_over=record.retention_over,
        same_payload=True,
        recovery=policy.recovery,
    )
    if decision is Decision.START_OVER:
        return None
    status = KeyStatus(_STATUS_OF[decision], created_at=record.created_at, expires_at=record.expires_at)
    if decision is Decision.WAIT:
        return replace(status, retry_after=retry_after(lease_left, policy))
    if decision is Decision.REPLAY:
        return replace(status, response_status=record.response_status, completed_at=record.completed_at)
    return status
