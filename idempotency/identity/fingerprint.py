"""The fingerprint of a payload. It detects a retry that sends another payload under the same key.

It consists of the algorithm's version, an id of the secret, and a keyed digest of the payload's canonical text. Two
payloads have the same canonical text only if they are the same value:

* A tag names the type: 1, "1" and True differ, and so do None and an absent name. All numbers have one type, so 1, 1.0
  and ``Decimal("1.00")`` are one value. Only an int of more than 50 digits differs from the float or Decimal that
  equals it.
* A length precedes everything of variable length (the characters of a text, the items of a container), so that two
  values can't become equal by concatenation. It counts code points, because the text is encoded once at the end.
* The names of an object are sorted, because their order does not count. The order of a list counts.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from django.core.files.uploadedfile import UploadedFile
from django.utils.datastructures import MultiValueDict
from django.utils.encoding import force_bytes
from django.utils.functional import cached_property

from ..conf import settings
from ..exceptions import PayloadInvalidError
from .parsing import (
    CSRF_FIELD,
    MAX_DEPTH,
    NOT_FINITE,
    TOO_DEEP,
    CanonicalJSON,
    decimal_text,
    is_short_integer,
    sorted_pairs,
)

#: The version of the algorithm. Each fingerprint starts with it. Never change a released algorithm, because stored
#: records use it. Add a version instead.
VERSION: Final = "v1"

#: Distinguishes these keys from others that are derived from the same secret.
_PURPOSE: Final = "idempotency.fingerprint"

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


#: The parts of a canonical text that is being written.
_Text = list[str]


@dataclass(frozen=True, repr=False)
class Payload:
    """The content of a request, without the account, the key, and headers, which a retry may change.

    It has no ``repr``, because crash reports show local variables.

    :param content: the parsed body, or the result of the operation's ``payload``.
    :param route: the request's route, and the route's arguments by name or position.
    :param query: the raw query string.
    """

    content: object
    method: str = ""
    route: Mapping[str, object] | Sequence[object] = ()
    query: str = ""

    @cached_property
    def request_hash(self) -> str:
        """The fingerprint to record: version, secret's id (8 hexadecimal digits) and digest (64), separated by colons.

        :raises PayloadInvalidError: the payload contains a number that is not finite, or is nested too deeply.
        :raises TypeError: the command contains an object whose type has no canonical form.
        """
        return _keyed(self._digest, settings().fingerprint_secrets[0])

    def matches(self, request_hash: str) -> bool:
        """Whether a recorded fingerprint is the fingerprint of this payload under one of the secrets.

        A version that this release doesn't know never matches, so such a record is never replayed. Raises the errors
        of ``request_hash``.
        """
        return request_hash == self.request_hash or any(
            _keyed(self._digest, secret) == request_hash for secret in settings().fingerprint_secrets[1:]
        )

    @cached_property
    def _digest(self) -> bytes:
        canonical: _Text = []
        try:
            for part in (self.method, self.route, sorted_pairs(self.query), self.content):
                _write_value(part, canonical, MAX_DEPTH)
        except RecursionError:
            # The depth is bounded, but the caller's stack may already be close to the interpreter's limit.
            raise PayloadInvalidError(TOO_DEEP) from None
        except TypeError as error:
            # Raise a new error, because the frames of this one hold the payload, and crash reports show frames.
            raise TypeError(*error.args) from None
        # A lone surrogate is valid in Python, but not in UTF-8.
        return hashlib.sha256("".join(canonical).encode("utf-8", "surrogatepass")).digest()


def is_known(request_hash: str) -> bool:
    """Whether this release has the algorithm of a recorded fingerprint."""
    return request_hash.startswith(f"{VERSION}:")


def has_known_secret(request_hash: str) -> bool:
    """Whether this process has the secret of a recorded fingerprint. The version must be known."""
    secret_id = request_hash.split(":")[1]
    return any(_key_of(secret)[1] == secret_id for secret in settings().fingerprint_secrets)


def _keyed(digest: bytes, secret: str | bytes) -> str:
    # Keyed, because a reader of the table could otherwise find a PIN or a card number by trying all of them.
    key, secret_id = _key_of(secret)
    return f"{VERSION}:{secret_id}:{hmac.digest(key, digest, 'sha256').hex()}"


@lru_cache(maxsize=16)
def _key_of(secret: str | bytes) -> tuple[bytes, str]:
    """The key that Django's ``salted_hmac`` would derive from the secret, and the secret's id.

    The id distinguishes an unknown secret from another payload, and reveals no more about the secret than a digest.
    """
    key = hashlib.sha256(_PURPOSE.encode() + force_bytes(secret)).digest()
    return key, hmac.digest(key, b"id", "sha256")[:4].hex()


if TYPE_CHECKING:  # Django's class takes no type argument when the code runs
    _UploadedFile = UploadedFile[bytes]
else:
    _UploadedFile = UploadedFile


class DigestedUpload(_UploadedFile):
    """The digest of an uploaded file, with the same fingerprint as the file."""

    def __init__(self, sha256: str, **names: Any) -> None:
        super().__init__(file=None, **names)
        self.sha256 = sha256


def _write_value(value: object, out: _Text, depth: int) -> None:
    """Write the canonical form of one value, which may have ``depth`` further levels of nesting."""
    # The types of JSON come first and are compared by identity, because most payloads have no others.
    kind = type(value)
    if kind is str:
        out.append(f"s{len(value)}:{value}")  # type: ignore[arg-type]
    elif kind is int:
        # Hexadecimal, because str() of a long integer takes quadratic time, and raises above the digit limit.
        out.append(f"i{value:x};")
    elif value is None:
        out.append("n")
    elif value is True:
        out.append("t")
    elif value is False:
        out.append("f")
    elif kind is dict:
        _write_object(value, out, depth)  # type: ignore[arg-type]
    elif kind is list or kind is tuple:
        _write_items("l", value, out, depth)  # type: ignore[arg-type]
    elif kind is float:
        _write_decimal(_decimal_of(value), out)  # type: ignore[arg-type]
    elif isinstance(value, CanonicalJSON):
        # The digest, because the text itself would be copied several times. It has a fixed length, so no length
        # precedes it.
        out.append(f"J{hashlib.sha256(value.text).hexdigest()}")
    else:
        _write_other(value, out, depth)


def _write_items(tag: str, items: Sequence[object], out: _Text, depth: int) -> None:
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    out.append(f"{tag}{len(items)}:")
    for item in items:
        _write_value(item, out, depth - 1)


def _write_object(value: Mapping[str, object], out: _Text, depth: int) -> None:
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    out.append(f"o{len(value)}:")
    for name in _sorted_names(value):
        out.append(f"{len(name)}:{name}")
        _write_value(value[name], out, depth - 1)


def _sorted_names(value: Mapping[str, object]) -> list[str]:
    for name in value:
        if type(name) is not str:
            # A subclass of str may sort, print or compare differently.
            raise TypeError(
                f"A {type(value).__qualname__} with a name of type {type(name).__qualname__} can't be fingerprinted. "
                "Use plain str for the names in the command."
            )
    return sorted(value)


def _write_text(tag: str, text: str, out: _Text) -> None:
    out.append(f"{tag}{len(text)}:{text}")


def _write_bytes(value: bytes | bytearray | memoryview, out: _Text, depth: int) -> None:
    content = bytes(value)
    out.append(f"b{len(content)}:{hashlib.sha256(content).hexdigest()}")


def _decimal_of(value: float) -> Decimal:
    # repr() is the shortest text that parses to the same float, and the one that JSON encoders write.
    return Decimal(float.__repr__(value))


def _write_decimal(value: Decimal, out: _Text, depth: int = 0) -> None:
    if not value.is_finite():
        raise PayloadInvalidError(NOT_FINITE)
    if is_short_integer(value):
        out.append(f"i{int(value):x};")
    else:
        out.append(f"D{decimal_text(value)};")


def _write_datetime(value: dt.datetime, out: _Text, depth: int) -> None:
    if value.utcoffset() is None:
        # A clock that is set back shows the same time twice. fold distinguishes the two, and isoformat() omits it.
        _write_text("w", f"{value.isoformat()}/{value.fold}", out)
    else:
        # The instant without the offset from UTC, because the user's time zone may change before the retry.
        _write_text("W", _parts(value - _EPOCH), out)


def _parts(duration: dt.timedelta) -> str:
    return f"{duration.days}/{duration.seconds}/{duration.microseconds}"


def _write_form(value: MultiValueDict[str, object], out: _Text, depth: int) -> None:
    """Write a form without the CSRF token. The order of the values of one name counts."""
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    names = [name for name in _sorted_names(value) if name != CSRF_FIELD]
    out.append(f"q{len(names)}:")
    for name in names:
        out.append(f"{len(name)}:{name}")
        _write_items("l", value.getlist(name), out, depth - 1)


def _write_upload(value: UploadedFile[Any], out: _Text, depth: int) -> None:
    """Write an uploaded file by its names and content, without the form's boundary."""
    out.append("U")
    for part in (value.name, value.content_type, value.charset, _content_digest(value)):
        _write_value(part, out, depth)


def _content_digest(value: UploadedFile[Any]) -> str:
    if isinstance(value, DigestedUpload):
        return value.sha256
    digest = hashlib.sha256()
    try:
        position = value.tell()
        # chunks() reads from the start. Restore the position for the handler.
        for chunk in value.chunks():
            digest.update(chunk)
        value.seek(position)
    except (AttributeError, ValueError) as error:
        # A ValueError if the file is closed or, as io.UnsupportedOperation, can't be rewound.
        raise TypeError(
            f"The uploaded file {value.name!r} can't be read twice, so it can't be fingerprinted. Give the operation a "
            f"payload= that identifies the file without reading it."
        ) from error
    return digest.hexdigest()


# The order matters: a datetime is a date, and a form is a dict. Subclasses of JSON's types, such as the members of
# Django's TextChoices, are written like these types. No name of a class is written, because a deploy may change it.
_OTHER_TYPES: Sequence[tuple[type | tuple[type, ...], Callable[[Any, _Text, int], None]]] = (
    (Decimal, _write_decimal),
    (UUID, lambda value, out, depth: out.append(f"u{value.hex}")),
    (dt.datetime, _write_datetime),
    (dt.date, lambda value, out, depth: _write_text("y", value.isoformat(), out)),
    (dt.time, lambda value, out, depth: _write_text("h", f"{value.isoformat()}/{value.fold}", out)),
    (dt.timedelta, lambda value, out, depth: _write_text("p", _parts(value), out)),
    (UploadedFile, _write_upload),
    (MultiValueDict, _write_form),
    (Mapping, _write_object),
    ((list, tuple), lambda value, out, depth: _write_items("l", value, out, depth)),
    (str, lambda value, out, depth: _write_text("s", str.__str__(value), out)),
    (int, lambda value, out, depth: out.append(f"i{int.__format__(value, 'x')};")),
    (float, lambda value, out, depth: _write_decimal(_decimal_of(value), out)),
    ((bytes, bytearray, memoryview), _write_bytes),
)


def _write_other(value: object, out: _Text, depth: int) -> None:
    for types, writer in _OTHER_TYPES:
        if isinstance(value, types):
            return writer(value, out, depth)
    kind = type(value)
    raise TypeError(
        f"An object of type {kind.__module__}.{kind.__qualname__} can't be fingerprinted. Give the operation a "
        f"payload= of plain values (str, int, Decimal, datetime, UUID, dict, list…): an enum's value, a sorted list "
        f"instead of a set, a dict instead of a dataclass, a primary key instead of a model instance."
    )
