"""Validators of options.

Each returns None, or the problem with a value as the end of a sentence that starts with the option's name.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from collections.abc import Collection, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from django.db import connections
from django.utils.encoding import force_bytes

from .values import ACP, IETF, NEVER_RECORDED_HEADERS, PARK, REEXECUTE, STRIPE, Attach, InProgress, Reconcile, Wait

FERNET_KEY_BYTES = 32
MAX_NAME_LENGTH = 255  # the length of the columns
MAX_DURATION = timedelta(days=36_500)  # databases can't add very long durations to the current time


def name(value: object) -> str | None:
    valid = isinstance(value, str) and 0 < len(value) <= MAX_NAME_LENGTH and value.isprintable()
    return None if valid else f"must be 1 to {MAX_NAME_LENGTH} printable characters"


def positive_duration(value: object) -> str | None:
    valid = isinstance(value, timedelta) and timedelta(0) < value <= MAX_DURATION
    return None if valid else f"must be a positive timedelta of up to {MAX_DURATION.days} days"


def positive_bytes(value: object) -> str | None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return None if valid else "must be a positive number of bytes"


def flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "must be True or False"


def recovery(value: object) -> str | None:
    valid = value in (REEXECUTE, PARK) or isinstance(value, Reconcile)
    return None if valid else "must be REEXECUTE, PARK or Reconcile(fn)"


def in_progress(value: object) -> str | None:
    valid = isinstance(value, (InProgress, Wait, Attach))
    return None if valid else "must be CONFLICT, ACCEPTED, Wait(seconds) or Attach(location)"


def profile(value: object) -> str | None:
    return None if value in (IETF, STRIPE, ACP) else f"must be {IETF!r}, {STRIPE!r} or {ACP!r}"


def url(value: object) -> str | None:
    valid = isinstance(value, str) and re.fullmatch(r"https?://[!-~]+", value) is not None and "#" not in value
    return None if valid else "must be a URL without a fragment"


def names(value: object) -> str | None:
    valid = (
        isinstance(value, Collection)
        and not isinstance(value, (str, bytes))
        and all(isinstance(name, str) and name for name in value)
    )
    return None if valid else "must be a collection of names"


def aliases(value: object) -> str | None:
    if not isinstance(value, Mapping) or not all(isinstance(alias, str) for pair in value.items() for alias in pair):
        return "must be a dict of aliases"
    unknown = {alias for pair in value.items() for alias in pair} - connections.settings.keys()
    return f"names {min(unknown)!r}, which DATABASES does not have" if unknown else None


def methods(value: Any) -> str | None:
    if problem := names(value):
        return problem
    if not value:
        return "must name at least one HTTP method"
    wrong = next((name for name in value if name != name.upper()), None)
    return None if wrong is None else f"names {wrong!r}: write {wrong.upper()!r}, because methods are in capitals"


def recorded_headers(value: Any) -> str | None:
    if problem := names(value):
        return problem
    refused = next((name for name in value if name.lower() in NEVER_RECORDED_HEADERS), None)
    return None if refused is None else f"names {refused!r}, which must not be replayed and is never recorded"


def secrets(value: object) -> str | None:
    valid = isinstance(value, (list, tuple)) and value and all(map(_is_secret, value))
    return None if valid else "must be a list or tuple of secrets (bytes, or str that UTF-8 can encode), none empty"


def _is_secret(value: object) -> bool:
    try:
        return isinstance(value, (str, bytes)) and bool(force_bytes(value))
    except UnicodeEncodeError:  # a lone surrogate
        return False


def fernet_keys(value: Any) -> str | None:
    if problem := secrets(value):
        return problem
    for key in value:
        try:
            valid = len(urlsafe_b64decode(key)) == FERNET_KEY_BYTES
        except ValueError:
            valid = False
        if not valid:
            return "must be a list or tuple of keys made by Fernet.generate_key()"
    if find_spec("cryptography") is None:
        return "must not be set without the package cryptography: pip install 'django-idempotency[encryption]'"
    return None


def callable_object(value: object) -> str | None:
    return None if callable(value) else "must be a callable"


def callable_or_path(value: object) -> str | None:
    return None if callable(value) or isinstance(value, str) else "must be a callable or a dotted path to one"
