"""The ``IDEMPOTENCY`` setting: ``settings()`` returns all its values in force.

When Django signals that the setting has changed, all entries are read again, so ``override_settings`` works in tests.
If an entry is wrong, ``settings()`` raises ``ImproperlyConfigured``. A default in its place would be a guess, and a
wrong guess would leave operations unprotected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db.models import Model

from .options.settings import SETTINGS, ProjectOptions
from .options.table import OPTIONS, Options

#: These statuses ask the client to retry later, as every 5xx does. The retry must run again, so they are no outcomes.
TRANSIENT_STATUSES = frozenset({408, 425, 429})

#: The statuses of a response to an invalid payload.
INVALID_STATUSES = frozenset({400, 422})

SETTING = "IDEMPOTENCY"

#: How far the clocks of clients, of this server and of the database may differ, where a key's own time is compared.
CLOCK_SKEW = timedelta(minutes=5)


def is_recordable(status: int) -> bool:
    """The default of ``RECORDABLE``: everything but 408, 425, 429 and the 5xx."""
    return status < 500 and status not in TRANSIENT_STATUSES


def is_recordable_unless_invalid(status: int) -> bool:
    """For ``recordable``: the default without 400 and 422, so that the retry of an invalid request runs again.

    A retry has the same payload. It may succeed later, for example after the customer that the payload names has been
    created. A corrected payload is another payload and needs another key.
    """
    return is_recordable(status) and status not in INVALID_STATUSES


def authenticated_user(request: Any) -> str | None:
    """The default of ``ACCOUNT``: the primary key of the authenticated user, or None if there is none.

    Users of two models may have the same primary key. So if the user is not an ``AUTH_USER_MODEL``, the account is the
    label of its model (or the name of its class, if that is not a model), a colon, and the primary key.
    """
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated or user.pk is None:
        return None
    account = str(user.pk)
    kind: Any = user.__class__  # not type(), which would return SimpleLazyObject for request.user
    if not issubclass(kind, Model):
        return f"{kind.__module__}.{kind.__qualname__}:{account}"
    model = kind._meta.concrete_model  # a proxy has the primary keys of its model
    # A primary key that is a text may have been chosen to look like the account of a user of another model.
    if model is _user_model(django_settings.AUTH_USER_MODEL) and ":" not in account:
        return account
    return f"{model._meta.label}:{account}"


@lru_cache
def _user_model(label: str) -> type[Model] | None:
    try:
        model: type[Model] | None = apps.get_model(label)._meta.concrete_model
    except LookupError:
        return None  # django.contrib.auth is not installed
    return model


def require_app(name: str) -> None:
    """Say which app a project has to add. Called by what belongs to an app of this package.

    :raises ImproperlyConfigured: the app is not in ``INSTALLED_APPS``.
    """
    if not apps.is_installed(name):
        raise ImproperlyConfigured(
            f"{name!r} is used, but it is not in INSTALLED_APPS. Add it, and run manage.py migrate."
        )


@dataclass(frozen=True)
class Mistake:
    """A mistake in ``IDEMPOTENCY`` or in an operation. System checks report it, and at run time it is an error."""

    message: str
    hint: str
    check_id: str

    def __str__(self) -> str:
        return f"{self.message} {self.hint} ({self.check_id})"


def mistakes_in(entries: object) -> list[Mistake]:
    """Find the mistakes in a value of ``IDEMPOTENCY``: in each entry, and in the entries together."""
    if not isinstance(entries, Mapping):
        return [
            Mistake(
                f"IDEMPOTENCY must be a dictionary, not {type(entries).__name__}.",
                'For example IDEMPOTENCY = {"TTL": timedelta(days=3)}.',
                "idempotency.E001",
            )
        ]
    mistakes = [mistake for name, value in entries.items() if (mistake := _mistake_in_entry(name, value))]
    return mistakes or list(_contradictions(entries))


def _contradictions(entries: Mapping[str, Any]) -> Iterator[Mistake]:
    names = ("TTL", "LEASE", "MAX_KEY_AGE", "BODY_TTL")
    ttl, lease, max_key_age, body_ttl = (entries.get(name, SETTINGS[name].default) for name in names)
    if lease >= ttl:
        yield Mistake(
            f"IDEMPOTENCY['LEASE'] ({lease}) must be shorter than IDEMPOTENCY['TTL'] ({ttl}).",
            "The lease is how long a crash blocks a key. The TTL is how long an outcome is kept.",
            "idempotency.E014",
        )
    if max_key_age is not None and max_key_age > ttl - CLOCK_SKEW:
        yield Mistake(
            f"IDEMPOTENCY['MAX_KEY_AGE'] ({max_key_age}) must be shorter than IDEMPOTENCY['TTL'] ({ttl}) by five "
            f"minutes, because clocks may differ by as much. A key whose record is gone could run again.",
            "Set a shorter MAX_KEY_AGE or a longer TTL.",
            "idempotency.E025",
        )
    if body_ttl is not None and body_ttl >= ttl:
        yield Mistake(
            f"IDEMPOTENCY['BODY_TTL'] ({body_ttl}) must be shorter than IDEMPOTENCY['TTL'] ({ttl}), at which the whole "
            f"record is deleted.",
            "Set a shorter BODY_TTL or a longer TTL, or leave BODY_TTL out.",
            "idempotency.E028",
        )


def _mistake_in_entry(name: Any, value: Any) -> Mistake | None:
    option = SETTINGS.get(name)
    if option is None:
        near = get_close_matches(str(name).upper(), SETTINGS, n=1, cutoff=0.5)
        return Mistake(
            f"IDEMPOTENCY has no entry {name!r}.",
            f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(sorted(SETTINGS))}.",
            "idempotency.E002",
        )
    problem = option.problem_of_setting(value)
    if problem is None:
        return None
    return Mistake(option.complaint(f"{SETTING}[{name!r}]", problem, value), option.hint, option.check_id)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Settings(ProjectOptions):
    """The values in force. Sizes are in bytes, and dotted paths are replaced by the objects that they name."""

    defaults: Options
    """What is in force for an operation that declares no option."""

    fingerprint_secrets: Sequence[str | bytes]
    """The secrets in force. New fingerprints use the first, and recorded ones are compared under each of them."""


@cache
def settings() -> Settings:
    """The values in force, which are read and validated at the first call since the settings changed.

    :raises ImproperlyConfigured: an entry of ``IDEMPOTENCY`` is wrong.
    """
    entries = getattr(django_settings, SETTING, {})
    for mistake in mistakes_in(entries):
        raise ImproperlyConfigured(str(mistake))
    values = {
        option.name: option.value_of(entries.get(setting, option.default)) for setting, option in SETTINGS.items()
    }
    defaults = {name: values.pop(name, option.default) for name, option in OPTIONS.items()}
    secrets = values["fingerprint_keys"]
    if secrets is None:
        secrets = (django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS)
    return Settings(defaults=Options(**defaults), fingerprint_secrets=secrets, **values)


def _read_again(*, setting: str, **arguments: Any) -> None:
    """Forget the values in force. Receives Django's ``setting_changed``."""
    if setting in {SETTING, "SECRET_KEY", "SECRET_KEY_FALLBACKS"}:
        settings.cache_clear()


setting_changed.connect(_read_again)
