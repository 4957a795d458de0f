"""The ``IDEMPOTENCY`` setting: ``settings()`` returns the values in force.

They are read again when Django signals a change, so ``override_settings`` works. If an entry is invalid, ``settings()``
raises ``ImproperlyConfigured``, because falling back to a default could leave operations unprotected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import cache
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import Error
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from .options.table import OPTIONS, SETTINGS, Options, ProjectOptions

#: Not outcomes: like every 5xx, they mean that the client should retry, and the retry must run.
TRANSIENT_STATUSES = frozenset({408, 425, 429})

#: The statuses for an invalid payload.
INVALID_STATUSES = frozenset({400, 422})
SETTING = "IDEMPOTENCY"

#: Entries that don't exist, but that an operator might try in an emergency.
_SWITCHES = frozenset({"ENABLED", "ENABLE", "DISABLED", "DISABLE", "ACTIVE"})

#: How far the clocks of clients, this server and the database may differ when a key's timestamp is compared.
CLOCK_SKEW = timedelta(minutes=5)


def is_recordable(status: int) -> bool:
    """The default of ``RECORDABLE``: every status except 408, 425, 429 and 5xx."""
    return status < 500 and status not in TRANSIENT_STATUSES


def is_recordable_unless_invalid(status: int) -> bool:
    """For ``recordable``: the default without 400 and 422, so that a retry of an invalid request runs again.

    The same payload may succeed later, for example after the customer that it names has been created. A corrected
    payload needs another key.
    """
    return is_recordable(status) and status not in INVALID_STATUSES


def require_app(name: str) -> None:
    """:raises ImproperlyConfigured: the app is not in ``INSTALLED_APPS``."""
    if not apps.is_installed(name):
        raise ImproperlyConfigured(
            f"{name!r} is used, but it is not in INSTALLED_APPS. Add it, and run manage.py migrate."
        )


def refuse(mistakes: Iterable[Error]) -> None:
    """:raises ImproperlyConfigured: there is a mistake. System checks report the same mistakes."""
    for mistake in mistakes:
        raise ImproperlyConfigured(f"{mistake.msg} {mistake.hint} ({mistake.id})")


def mistakes_in_settings() -> list[Error]:
    """The mistakes in ``IDEMPOTENCY``: in single entries or, if there are none, contradictions between entries."""
    entries = getattr(django_settings, SETTING, {})
    if not isinstance(entries, Mapping):
        return [
            Error(
                f"IDEMPOTENCY must be a dictionary, not {type(entries).__name__}.",
                hint='For example IDEMPOTENCY = {"RETENTION": timedelta(days=3)}.',
                id="idempotency.E001",
            )
        ]
    mistakes = [mistake for name, value in entries.items() if (mistake := _mistake_in_entry(name, value))]
    durations = {name.lower(): entries.get(name, option.default) for name, option in SETTINGS.items()}
    return mistakes or list(contradictions(SETTING, durations, str.upper))


def contradictions(subject: str, values: Mapping[str, Any], spell: Callable[[str], str] = str) -> Iterator[Error]:
    """Find contradictions between durations.

    :param subject: the operation or setting that the message names.
    :param values: the durations by option; None for one that is not set.
    :param spell: turns an option's name into the name that the subject uses.
    """
    options = ("retention", "lease", "heartbeat", "max_key_age", "body_retention")
    retention, lease, heartbeat, max_key_age, body_retention = map(values.get, options)

    def too_long(option: str, reason: str, rule: str = "must be shorter than") -> Error:
        message = f"{subject}: {spell(option)} ({values[option]}) {rule} {spell('retention')} ({retention}){reason}."
        hint = f"Set a shorter {spell(option)} or a longer {spell('retention')}."
        return Error(message, hint=hint, id="idempotency.E014")

    if retention is None:
        return
    if lease is not None and lease >= retention:
        yield too_long("lease", ", because a crash blocks a key until its lease is over")
    if heartbeat is not None and heartbeat > retention:
        reason = ", because a run must not outlast the retention of its key"
        yield too_long("heartbeat", reason, "must not be longer than")
    if max_key_age is not None and max_key_age > retention - CLOCK_SKEW:
        reason = " by five minutes, because clocks may differ by as much. A key whose record is gone could run again"
        yield too_long("max_key_age", reason)
    if body_retention is not None and body_retention >= retention:
        yield too_long("body_retention", ", at which the whole record is deleted")


def _mistake_in_entry(name: Any, value: Any) -> Error | None:
    option = SETTINGS.get(name)
    if option is None:
        near = get_close_matches(str(name).upper(), SETTINGS, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(sorted(SETTINGS))}."
        if name in _SWITCHES:
            hint = (
                "No entry switches the protection off. The page 'Introduce it, switch it off' of the documentation "
                "(how-to/introduce) shows how to run requests without protection."
            )
        return Error(f"IDEMPOTENCY has no entry {name!r}.", hint=hint, id="idempotency.E002")
    problem = option.problem_of_setting(value)
    if problem is None:
        return None
    message = option.complaint(f"{SETTING}[{name!r}]", problem, value)
    return Error(message, hint=option.hint, id="idempotency.E003")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Settings(ProjectOptions):
    """The values in force. Dotted paths are replaced by the objects that they name."""

    #: The values of options that an operation does not declare.
    defaults: Options
    #: New fingerprints use the first secret. Recorded ones are compared under every secret.
    fingerprint_secrets: Sequence[str | bytes]


@cache
def settings() -> Settings:
    """The values in force, read and validated at the first call after a change."""
    refuse(mistakes_in_settings())
    entries = getattr(django_settings, SETTING, {})
    values = {
        option.name: option.value_of(entries.get(setting, option.default)) for setting, option in SETTINGS.items()
    }
    defaults = {name: values.pop(name, option.default) for name, option in OPTIONS.items()}
    secrets = values["fingerprint_keys"]
    if secrets is None:
        secrets = (django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS)
    return Settings(defaults=Options(**defaults), fingerprint_secrets=secrets, **values)


def _read_again(*, setting: str, **arguments: Any) -> None:
    """Receives Django's ``setting_changed``."""
    if setting in {SETTING, "SECRET_KEY", "SECRET_KEY_FALLBACKS"}:
        settings.cache_clear()


setting_changed.connect(_read_again)
