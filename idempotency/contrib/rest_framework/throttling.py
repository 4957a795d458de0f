"""Throttled retries: a recorded outcome is told even if a throttle has refused the request.

DRF checks throttles at the end of ``initial()``, before the handler. If a throttle refuses a request to a protected
handler, the request still goes to the handler, which then replays a recorded outcome or raises the throttle's own
error, and never runs. So everything that comes before the handler (authentication, permissions, an overridden
``initial()``, decorators above ``@idempotent``) is checked as for a first execution, and only a request that is
throttled pays for the look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register
from rest_framework.settings import api_settings
from rest_framework.throttling import UserRateThrottle

from ...http.class_views import may_have_key, operation_of_request
from ...http.exchange import refuse_unless_recorded

#: The entry of ``DEFAULT_THROTTLE_RATES`` that switches this on, and bounds it.
SCOPE = "idempotent_replays"


class ReplayThrottle(UserRateThrottle):
    """Bounds the look-ups of throttled requests for each user, or for each address if there is no user.

    Each look-up counts, whether it finds an outcome or not, so a flood of unknown keys is bounded, too.
    """

    scope = SCOPE

    def get_rate(self) -> str | None:
        rates: Any = api_settings.DEFAULT_THROTTLE_RATES  # not self.THROTTLE_RATES, which was read at import
        rate: str | None = rates.get(SCOPE)
        return rate


@register("idempotency")
def check_rate(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the rate now, because DRF reads it at the first throttled request."""
    try:
        ReplayThrottle()
    except (ValueError, LookupError, AttributeError):
        return [
            Error(
                f"DEFAULT_THROTTLE_RATES[{SCOPE!r}] is no rate.",
                hint='For example "60/min". Without the entry, throttled retries are refused.',
                id="idempotency.E021",
            )
        ]
    return []


def answer_throttled_retries(view_class: Any) -> None:
    """Let a class with protected handlers answer throttled retries. Done once for a class."""
    refuse = view_class.throttled
    if getattr(refuse, "_answers_retries", False):
        return

    @functools.wraps(refuse)
    def throttled(view: Any, request: Any, wait: float | None) -> None:
        try:
            refuse(view, request, wait)
        except Exception as refusal:
            if not _may_look_up(view, request):
                raise
            refuse_unless_recorded(request._request, refusal)

    throttled._answers_retries = True  # type: ignore[attr-defined]
    view_class.throttled = throttled


def _may_look_up(view: Any, request: Any) -> bool:
    operation = operation_of_request(type(view), request.method, getattr(view, "action_map", None))
    if operation is None or not may_have_key(operation, request._request):
        return False
    bound = ReplayThrottle()
    return bound.rate is not None and bound.allow_request(request, view)
