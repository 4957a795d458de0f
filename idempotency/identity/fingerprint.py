"""The fingerprint tells whether a retry has the same payload as the request that claimed its key.

A payload is written as a canonical text. A record keeps a keyed digest of that text, and the version of the algorithm
that wrote it. This module imports neither DRF nor models.

Two payloads have the same canonical text only if they are the same value:

* A tag names the type: 1, 1.0, "1" and True differ, and so do None and an absent name.
* A length comes before everything of variable length (the characters of a text, the items of a container), so that two
  values can't become equal by concatenation.
* The names of an object are sorted, because their order does not count. The order of a list counts.

Lengths are in code points and not in bytes, because the whole text is encoded once at the end.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import hmac
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from django.core.files.uploadedfile import UploadedFile
from django.utils.datastructures import MultiValueDict
from django.utils.encoding import force_bytes
from django.utils.functional import cached_property

from ..conf import settings
from ..exceptions import PayloadInvalidError
from .parsing import CSRF_FIELD, MAX_DEPTH, NOT_FINITE, TOO_DEEP, CanonicalJSON, decimal_text, sorted_pairs

CURRENT_VERSION: Final = "v1"

#: Makes these keys differ from those that Django and other packages derive from the same secret.
_PURPOSE: Final = "idempotency.fingerprint"

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)

_Write = Callable[[str], None]


@dataclasses.dataclass(frozen=True, repr=False)
class Payload:
    """What a request asks for, without the account and the key. Headers don't belong to it: a retry may change them.

    The ``repr`` shows none of it, because crash reports show the ``repr`` of local variables.

    :param command: the parsed body, or the command object that the operation makes from the request.
    :param method: the HTTP method.
    :param route: the arguments of the route, ``(args, kwargs)``, as the view is called with them.
    :param query: the raw query string.
    """

    command: object
    method: str = ""
    route: Mapping[str, object] | Sequence[object] = ()
    query: str = ""

    @cached_property
    def request_hash(self) -> str:
        """The fingerprint to record: the version of the algorithm, a colon, and 64 hexadecimal digits.

        :raises PayloadInvalidError: the client's payload has no canonical form, because it contains a number that is
            not finite or is nested too deeply.
        :raises TypeError: the command contains an object whose type has no canonical form. That is the caller's
            mistake.
        """
        return _keyed(CURRENT_VERSION, self._current_digest, settings.fingerprint_secrets[0])

    def matches(self, request_hash: str) -> bool:
        """Whether a recorded fingerprint is the fingerprint of this payload.

        It is compared under the version in which it was recorded and under every secret in force. A version that this
        release doesn't know never matches, so such a record is never replayed. Raises the errors of ``request_hash``.
        """
        if self.request_hash == request_hash:
            return True
        version, _, _ = request_hash.partition(":")
        if version not in _ALGORITHMS:
            return False
        digest = self._current_digest if version == CURRENT_VERSION else self._digest(version)
        return any(_keyed(version, digest, secret) == request_hash for secret in settings.fingerprint_secrets)

    @cached_property
    def _current_digest(self) -> bytes:
        return self._digest(CURRENT_VERSION)

    def _digest(self, version: str) -> bytes:
        try:
            canonical = _ALGORITHMS[version](self)
        except RecursionError:
            # The depth is bounded, but the caller's stack may already be close to the interpreter's limit.
            raise PayloadInvalidError(TOO_DEEP) from None
        except TypeError as error:
            # Raise a new error, because the frames of this one hold the payload, and crash reports show frames.
            raise TypeError(*error.args) from None
        # A lone surrogate is legal in JSON (as an escape) and in Python, but not in UTF-8.
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).digest()


def is_known(request_hash: str) -> bool:
    """Whether this release has the algorithm with which a recorded fingerprint was made."""
    return request_hash.partition(":")[0] in _ALGORITHMS


def _keyed(version: str, digest: bytes, secret: str | bytes) -> str:
    # If the digest were not keyed, somebody who reads the table could find a short secret in the payload, such as a PIN
    # or a card number, by trying all of them.
    return f"{version}:{hmac.digest(_key_of(secret), digest, 'sha256').hex()}"


@lru_cache(maxsize=16)
def _key_of(secret: str | bytes) -> bytes:
    """The key that Django's ``salted_hmac`` would derive from the secret."""
    return hashlib.sha256(_PURPOSE.encode() + force_bytes(secret)).digest()


class DigestedUpload(UploadedFile):  # type: ignore[type-arg]
    """An uploaded file of which only the digest was kept. It has the same fingerprint as the file itself."""

    def __init__(self, sha256: str, **names: Any) -> None:
        super().__init__(file=None, **names)
        self.sha256 = sha256


def _canonical_v1(payload: Payload) -> str:
    parts: list[str] = []
    write = parts.append
    _write_value(payload.method, write, MAX_DEPTH)
    _write_value(payload.route, write, MAX_DEPTH)
    _write_value(sorted_pairs(payload.query), write, MAX_DEPTH)
    _write_value(payload.command, write, MAX_DEPTH)
    return "".join(parts)


# Never change a released algorithm, because records were made with it. Add a new one and make it CURRENT_VERSION.
_ALGORITHMS: Mapping[str, Callable[[Payload], str]] = {"v1": _canonical_v1}


def _write_value(value: object, write: _Write, depth: int) -> None:
    """Write the canonical form of one value.

    :param depth: how many further levels of nesting the value may have.
    """
    # A JSON text and the types of JSON come first and are compared by identity, which is fast. Most payloads have no
    # other types.
    kind = type(value)
    if kind is str:
        write(f"s{len(value)}:{value}")  # type: ignore[arg-type]
    elif kind is int:
        # Hexadecimal, because str() of a long integer takes quadratic time and raises above the digit limit.
        write(f"i{value:x};")
    elif value is None:
        write("n")
    elif value is True:
        write("t")
    elif value is False:
        write("f")
    elif kind is dict:
        _write_object(value, write, depth)  # type: ignore[arg-type]
    elif kind is list or kind is tuple:
        _write_items("l", value, write, depth)  # type: ignore[arg-type]
    elif kind is float:
        _write_float(value, write)  # type: ignore[arg-type]
    elif isinstance(value, CanonicalJSON):
        _write_text("J", value.text, write)
    else:
        _write_other(value, write, depth)


def _write_float(value: float, write: _Write) -> None:
    if not math.isfinite(value):
        raise PayloadInvalidError(NOT_FINITE)
    # repr() is the shortest text that reads back as the same float. It keeps the sign of zero, so 0.0 and -0.0 differ.
    write(f"d{float.__repr__(value)};")


def _write_items(tag: str, items: Sequence[object], write: _Write, depth: int) -> None:
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    write(f"{tag}{len(items)}:")
    for item in items:
        _write_value(item, write, depth - 1)


def _write_object(value: Mapping[str, object], write: _Write, depth: int) -> None:
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    write(f"o{len(value)}:")
    for name in _sorted_names(value):
        write(f"{len(name)}:{name}")
        _write_value(value[name], write, depth - 1)


def _sorted_names(value: Mapping[str, object]) -> list[str]:
    for name in value:
        if type(name) is not str:
            # A name of another type can't be written here. A subclass of str may sort, print or compare differently.
            raise TypeError(
                f"A {type(value).__qualname__} with a name of type {type(name).__qualname__} can't be fingerprinted. "
                "Use plain str for the names in the command."
            )
    return sorted(value)


def _write_text(tag: str, text: str, write: _Write) -> None:
    write(f"{tag}{len(text)}:{text}")


def _write_bytes(value: bytes | bytearray | memoryview, write: _Write, depth: int) -> None:
    content = bytes(value)
    write(f"b{len(content)}:{hashlib.sha256(content).hexdigest()}")


def _write_decimal(value: Decimal, write: _Write, depth: int) -> None:
    if not value.is_finite():
        raise PayloadInvalidError(NOT_FINITE)
    write(f"D{decimal_text(value)};")


def _write_datetime(value: dt.datetime, write: _Write, depth: int) -> None:
    if value.utcoffset() is None:
        # When a clock is put back, it shows the same time twice. fold tells the two apart, and isoformat() omits it.
        _write_text("w", f"{value.isoformat()}/{value.fold}", write)
    else:
        # Write the instant and not the offset from UTC, because the user's time zone may change before the retry.
        since = value - _EPOCH
        _write_text("W", f"{since.days}/{since.seconds}/{since.microseconds}", write)


def _write_date(value: dt.date, write: _Write, depth: int) -> None:
    _write_text("y", value.isoformat(), write)


def _write_time(value: dt.time, write: _Write, depth: int) -> None:
    _write_text("h", f"{value.isoformat()}/{value.fold}", write)


def _write_timedelta(value: dt.timedelta, write: _Write, depth: int) -> None:
    _write_text("p", f"{value.days}/{value.seconds}/{value.microseconds}", write)


def _write_uuid(value: UUID, write: _Write, depth: int) -> None:
    write(f"u{value.hex}")


def _write_enum(value: Enum, write: _Write, depth: int) -> None:
    _write_text("e", type(value).__qualname__, write)
    _write_value(value.value, write, depth)


def _write_set(value: Iterable[object], write: _Write, depth: int) -> None:
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    written: list[str] = []
    for item in value:
        parts: list[str] = []
        _write_value(item, parts.append, depth - 1)
        written.append("".join(parts))
    # Sort the canonical texts, because a set has no order and its items may not be comparable with each other.
    write(f"S{len(written)}:")
    write("".join(sorted(written)))


def _write_dataclass(value: object, write: _Write, depth: int) -> None:
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    # A field that is ignored when two instances are compared is ignored here, too.
    fields = [field.name for field in dataclasses.fields(value) if field.compare]  # type: ignore[arg-type]
    _write_text("c", type(value).__qualname__, write)
    write(f"{len(fields)}:")
    for name in sorted(fields):
        write(f"{len(name)}:{name}")
        _write_value(getattr(value, name), write, depth - 1)


def _write_form(value: MultiValueDict[str, object], write: _Write, depth: int) -> None:
    """Write a parsed form or query. The order of the values of one name counts. The CSRF token does not count."""
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    names = [name for name in _sorted_names(value) if name != CSRF_FIELD]
    write(f"q{len(names)}:")
    for name in names:
        write(f"{len(name)}:{name}")
        _write_items("l", value.getlist(name), write, depth - 1)


def _write_upload(value: UploadedFile[Any], write: _Write, depth: int) -> None:
    """Write an uploaded file by its names and its content, but not by the boundary of the multipart form."""
    write("U")
    for part in (value.name, value.content_type, value.charset, _content_digest(value)):
        _write_value(part, write, depth)


def _content_digest(value: UploadedFile[Any]) -> str:
    if isinstance(value, DigestedUpload):
        return value.sha256
    digest = hashlib.sha256()
    try:
        position = value.tell()
        # chunks() reads the file from its beginning. Restore the position afterwards for the handler.
        for chunk in value.chunks():
            digest.update(chunk)
        value.seek(position)
    except (AttributeError, ValueError) as error:
        # A ValueError says that the file is closed or, as io.UnsupportedOperation, that it can't be rewound.
        raise TypeError(
            f"The uploaded file {value.name!r} can't be read twice, so it can't be fingerprinted. Give the operation "
            "a command= that identifies the file without reading it."
        ) from error
    return digest.hexdigest()


# The order matters: an Enum may also be a str or an int, a datetime is a date, and a form is a dict. A subclass of one
# of JSON's types is written like that type.
_OTHER_TYPES: Sequence[tuple[type | tuple[type, ...], Callable[[Any, _Write, int], None]]] = (
    (Enum, _write_enum),
    (Decimal, _write_decimal),
    (UUID, _write_uuid),
    (dt.datetime, _write_datetime),
    (dt.date, _write_date),
    (dt.time, _write_time),
    (dt.timedelta, _write_timedelta),
    (UploadedFile, _write_upload),
    (MultiValueDict, _write_form),
    (Mapping, _write_object),
    ((list, tuple), lambda value, write, depth: _write_items("l", value, write, depth)),
    (str, lambda value, write, depth: _write_text("s", str.__str__(value), write)),
    (int, lambda value, write, depth: write(f"i{int.__format__(value, 'x')};")),
    (float, lambda value, write, depth: _write_float(value, write)),
    ((bytes, bytearray, memoryview), _write_bytes),
    ((set, frozenset), _write_set),
)


def _write_other(value: object, write: _Write, depth: int) -> None:
    for types, writer in _OTHER_TYPES:
        if isinstance(value, types):
            return writer(value, write, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _write_dataclass(value, write, depth)
    kind = type(value)
    raise TypeError(
        f"An object of type {kind.__module__}.{kind.__qualname__} can't be fingerprinted. Give the operation a "
        f"command= of plain values (str, int, Decimal, datetime, UUID, dict, list, a dataclass…). Instead of a model "
        f"instance, use its primary key."
    )
