"""``KeyStatusView``: answers the owner of a key with the key's status, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views import View

from ..conf import settings
from ..exceptions import IdempotencyError, KeyMissingError
from ..identity import keys
from ..identity.scope import scope_of
from ..operation import Operation, Policy, registry
from ..protocol.key_status import key_status
from .adapter import Adapter
from .problems import PROFILES, report


class KeyStatusView(View):
    """Answer ``GET`` with the status of the key in the header ``Idempotency-Key``, for the account that asks::

        path("keys/<str:operation>/", login_required(KeyStatusView.as_view()))
        path("charges/key/", login_required(KeyStatusView.as_view(operation="charges.create")))

    The account is that of the operation's own resolver, so protect the view by the same authentication and permissions
    as the operation's view. A key of another account is as unknown as one that was never used. The key is not part of
    the URL, because URLs are logged. For a DRF view, use the class of this name in ``contrib.rest_framework``.
    """

    #: The operation, or its name. None takes the name from the argument ``operation`` of the URL.
    operation: str | Operation | None = None

    def get(self, request: HttpRequest, **route: Any) -> HttpResponse:
        policy = asked_policy(self.operation, route)
        response: HttpResponse = tell_status(policy, Adapter(request), lambda members: JsonResponse(dict(members)))
        return response


def asked_policy(fixed: str | Operation | None, route: Mapping[str, Any]) -> Policy:
    """The policy of the operation that a status view is asked about."""
    if isinstance(fixed, Operation):
        return fixed.policy
    name = route.get("operation") if fixed is None else fixed
    declared = registry.get(name) if isinstance(name, str) else None
    if declared is not None:
        return declared.policy
    if fixed is None and name is not None:
        raise Http404("There is no such operation.")
    raise ImproperlyConfigured(
        f"KeyStatusView needs the name of a declared operation, not {name!r}: as_view(operation=...), or the argument "
        f"`operation` of its URL."
    )


def tell_status(policy: Policy, adapter: Adapter, make: Callable[[Mapping[str, Any]], Any]) -> Any:
    """The response to a question about a key. ``make`` makes it from its JSON members."""
    meta, adapter.profile = adapter.http.META, PROFILES[policy.profile]
    if adapter.profile.is_scoped_by_path:
        raise ImproperlyConfigured(
            f"KeyStatusView can't know the status of a key of operation {policy.operation.name!r}: in the profile "
            f"{policy.profile!r} one key on two paths is two requests."
        )
    try:
        if keys.META_NAME not in meta:
            raise KeyMissingError
        account = policy.account(adapter.request)
        status = key_status(policy, scope_of(policy.operation.name, account, keys.parse_header(meta[keys.META_NAME])))
    except IdempotencyError as error:
        report(error, policy.operation.name)
        custom = settings().error_response
        response = adapter.answer_to_error(error) if custom is None else custom(adapter.request, error)
    else:
        times = {name: _text(getattr(status, name)) for name in ("created_at", "completed_at", "expires_at")}
        response = make({"status": status.status, "response_status": status.response_status, **times})
        response[keys.HEADER] = meta[keys.META_NAME]
        if status.retry_after is not None:
            response["Retry-After"] = str(status.retry_after)
    response["Cache-Control"] = "no-store"  # the next answer may be another one, and belongs to one account
    return response


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
