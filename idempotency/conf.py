"""The ``IDEMPOTENCY`` setting: one typed property an entry, read from ``django.conf.settings`` when it is first used.

A value is kept, since a request looks at a dozen of them, until Django signals that the setting has changed: so
``override_settings`` works and a test sees what it set. The system checks in ``checks.py`` validate the values; here a
missing entry is its default, and an explicit one is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

#: Longer than the longest source of retries: a dead-letter queue replayed on Monday holds Friday's requests.
DEFAULT_TTL = timedelta(days=3)
#: As long as a handler may be silent before it is presumed dead; above the usual 30 s worker timeout.
DEFAULT_LEASE = timedelta(seconds=60)
DEFAULT_METHODS = ("POST", "PATCH")
#: Headers that belong to the outcome. Everything else is made anew for each response.
DEFAULT_RECORDED_HEADERS = ("Location", "ETag", "Content-Language", "Content-Encoding", "Link")
#: Never recorded, whatever the allow-list says: credentials belong to one exchange, not to an outcome.
NEVER_RECORDED_HEADERS = frozenset({"set-cookie", "authorization", "proxy-authorization", "www-authenticate", "cookie"})
DEFAULT_MAX_BODY = 1024 * 1024
DEFAULT_MAX_RETRY_AFTER = timedelta(seconds=30)

#: 408, 425 and 429 ask for a later retry, and so does every 5xx: a retry must run again.
TRANSIENT_STATUSES = frozenset({408, 425, 429})

SETTING = "IDEMPOTENCY"
NAMES = frozenset(
    {
        "ACCOUNT",
        "ERROR_RESPONSE",
        "IN_PROGRESS",
        "LEASE",
        "MAX_BODY",
        "MAX_RETRY_AFTER",
        "METHODS",
        "RECORDABLE",
        "RECORDED_HEADERS",
        "REQUIRED",
        "TTL",
    }
)


def is_recordable(status: int) -> bool:
    """The default of ``RECORDABLE``: everything but 408, 425, 429 and the 5xx."""
    return status < 500 and status not in TRANSIENT_STATUSES


def authenticated_user(request: Any) -> str | None:
    """The default of ``ACCOUNT``: the primary key of the authenticated user, or None where there is none."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated or user.pk is None:
        return None
    return str(user.pk)


def resolve(value: Any) -> Any:
    """``value``, or what it names where it is a dotted path."""
    return import_string(value) if isinstance(value, str) else value


class Settings:
    """The values in force. Durations are timedeltas, sizes are bytes."""

    @property
    def _entries(self) -> Mapping[str, Any]:
        entries: Mapping[str, Any] = getattr(django_settings, SETTING, {})
        return entries

    @cached_property
    def ttl(self) -> timedelta:
        value: timedelta = self._entries.get("TTL", DEFAULT_TTL)
        return value

    @cached_property
    def lease(self) -> timedelta:
        value: timedelta = self._entries.get("LEASE", DEFAULT_LEASE)
        return value

    @cached_property
    def in_progress(self) -> Any:
        from .operation import CONFLICT

        return self._entries.get("IN_PROGRESS", CONFLICT)

    @cached_property
    def required(self) -> bool:
        value: bool = self._entries.get("REQUIRED", True)
        return value

    @cached_property
    def methods(self) -> Collection[str]:
        value: Collection[str] = self._entries.get("METHODS", DEFAULT_METHODS)
        return value

    @cached_property
    def account(self) -> Callable[[Any], str | None]:
        value: Callable[[Any], str | None] = resolve(self._entries.get("ACCOUNT", authenticated_user))
        return value

    @cached_property
    def recordable(self) -> Callable[[int], bool]:
        value: Callable[[int], bool] = resolve(self._entries.get("RECORDABLE", is_recordable))
        return value

    @cached_property
    def recorded_headers(self) -> Collection[str]:
        value: Collection[str] = self._entries.get("RECORDED_HEADERS", DEFAULT_RECORDED_HEADERS)
        return value

    @cached_property
    def max_body(self) -> int:
        value: int = self._entries.get("MAX_BODY", DEFAULT_MAX_BODY)
        return value

    @cached_property
    def error_response(self) -> Callable[[Any, Any], Any] | None:
        value: Callable[[Any, Any], Any] | None = resolve(self._entries.get("ERROR_RESPONSE"))
        return value

    @cached_property
    def max_retry_after(self) -> timedelta:
        value: timedelta = self._entries.get("MAX_RETRY_AFTER", DEFAULT_MAX_RETRY_AFTER)
        return value

    def reset(self, *, setting: str, **arguments: Any) -> None:
        """Read anew what has changed. Receives Django's ``setting_changed``."""
        if setting == SETTING:
            vars(self).clear()


settings = Settings()
setting_changed.connect(settings.reset)
