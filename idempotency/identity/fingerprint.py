"""The fingerprint: does a retry carry the same payload as the request that claimed its key?

A payload is written down in one canonical text. A keyed digest of that text, with the version of the way it was
written, is what a record keeps. Imports nothing of DRF and no models.

The canonical text is typed and framed, so that two payloads share it only if they are the same value:

* a tag says the type: 1, 1.0, "1" and True differ, and so do None and an absent name;
* everything of variable length is preceded by its length (characters of a text, items of a container), so that
  nothing collides by concatenation;
* names of an object are sorted, so that their order doesn't count; the order of a list does.

Lengths count code points, not bytes, since the whole text is encoded once at the end.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from functools import cached_property
from typing import Any, Final
from uuid import UUID

from django.core.files.uploadedfile import UploadedFile
from django.utils.crypto import salted_hmac
from django.utils.datastructures import MultiValueDict

from ..conf import settings
from ..exceptions import PayloadInvalidError
from .parsing import CSRF_FIELD, MAX_DEPTH, NOT_FINITE, TOO_DEEP, CanonicalJSON, decimal_text, sorted_pairs

CURRENT_VERSION: Final = "v1"

#: Keeps these keys apart from those that Django and others derive from the same secret.
_PURPOSE: Final = "idempotency.fingerprint"

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)

_Write = Callable[[str], None]


@dataclasses.dataclass(frozen=True, repr=False)
class Payload:
    """What one request asks for, apart from who asks and under which key.

    ``command`` is the parsed body, or the command object that the operation makes of the request. ``route`` is the
    route's arguments: ``(args, kwargs)`` as the view is called with them. ``query`` is the raw query string.
    Headers are left out: a retry may differ in them. Its ``repr`` shows nothing of this, because crash reports show it.
    """

    command: object
    method: str = ""
    route: Mapping[str, object] | Sequence[object] = ()
    query: str = ""

    @cached_property
    def request_hash(self) -> str:
        """The fingerprint to record: the version of the algorithm, a colon, and 64 hexadecimal digits.

        :raises PayloadInvalidError: the client's payload has no canonical form (a number that is not finite, absurd
            nesting).
        :raises TypeError: it holds an object of a type that has none, which is the caller's mistake.
        """
        return _keyed(CURRENT_VERSION, self._current_digest, settings.fingerprint_secrets[0])

    def matches(self, request_hash: str) -> bool:
        """Whether a recorded fingerprint is this payload's, computed with the version that the record was made with.

        The key that it was made with may be any of those in force. A version that this release doesn't know matches
        nothing: such a record is never replayed. Raises as ``request_hash`` does.
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
            # The depth is bounded, but the caller may have been close to the interpreter's limit already.
            raise PayloadInvalidError(TOO_DEEP) from None
        except TypeError as error:
            # Raised anew, because the frames that it comes from hold the payload, and crash reports show frames.
            raise TypeError(*error.args) from None
        # A lone surrogate is legal in JSON (as an escape) and in Python, but not in UTF-8.
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).digest()


def _keyed(version: str, digest: bytes, secret: str | bytes) -> str:
    # A plain digest would let whoever reads the table find a short secret of the payload (a PIN, a card number) by
    # trying all of them.
    return f"{version}:{salted_hmac(_PURPOSE, digest, secret, algorithm='sha256').hexdigest()}"


class DigestedUpload(UploadedFile):  # type: ignore[type-arg]
    """A file of a multipart form of which only the digest was kept. Its fingerprint is that of the file itself."""

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


# Never change an algorithm that was released: records were made with it. Add one, and make it CURRENT_VERSION.
_ALGORITHMS: Mapping[str, Callable[[Payload], str]] = {"v1": _canonical_v1}


def _write_value(value: object, write: _Write, depth: int) -> None:
    """Write the canonical form of one value. ``depth`` is how many levels may still nest in it."""
    # The types that JSON makes come first and are compared by identity: nearly every payload is made of them alone.
    kind = type(value)
    if kind is str:
        write(f"s{len(value)}:{value}")  # type: ignore[arg-type]
    elif kind is int:
        # Hexadecimal: str() of a long integer raises, and takes quadratic time before it does.
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
    else:
        _write_other(value, write, depth)


def _write_float(value: float, write: _Write) -> None:
    if not math.isfinite(value):
        raise PayloadInvalidError(NOT_FINITE)
    # The shortest text that reads back as the same float. The sign of zero is kept: 0.0 and -0.0 differ.
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
            # Another type of name, or a str that may sort, print or compare in its own way.
            raise TypeError(
                f"A {type(value).__qualname__} with a name of type {type(name).__qualname__} can't be fingerprinted. "
                "Give the names in the command as plain str."
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
        # fold tells apart the two times that a clock shows when it is put back. isoformat() leaves it out.
        _write_text("w", f"{value.isoformat()}/{value.fold}", write)
    else:
        # An instant, however far from UTC it was written: a user's time zone may change between request and retry.
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
    # A set has no order of its own, and its items may not compare with each other. Their canonical texts do.
    write(f"S{len(written)}:")
    write("".join(sorted(written)))


def _write_dataclass(value: object, write: _Write, depth: int) -> None:
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    # What doesn't count when two instances are compared doesn't count here either.
    fields = [field.name for field in dataclasses.fields(value) if field.compare]  # type: ignore[arg-type]
    _write_text("c", type(value).__qualname__, write)
    write(f"{len(fields)}:")
    for name in sorted(fields):
        write(f"{len(name)}:{name}")
        _write_value(getattr(value, name), write, depth - 1)


def _write_form(value: MultiValueDict[str, object], write: _Write, depth: int) -> None:
    """A parsed form or query: each name has a list of values, whose order counts. The CSRF token doesn't."""
    if not depth:
        raise PayloadInvalidError(TOO_DEEP)
    names = [name for name in _sorted_names(value) if name != CSRF_FIELD]
    write(f"q{len(names)}:")
    for name in names:
        write(f"{len(name)}:{name}")
        _write_items("l", value.getlist(name), write, depth - 1)


def _write_upload(value: UploadedFile[Any], write: _Write, depth: int) -> None:
    """A part of a multipart form by its names and its content, read in chunks. The boundary plays no part in it."""
    write("U")
    for part in (value.name, value.content_type, value.charset, _content_digest(value)):
        _write_value(part, write, depth)


def _content_digest(value: UploadedFile[Any]) -> str:
    if isinstance(value, DigestedUpload):
        return value.sha256
    digest = hashlib.sha256()
    try:
        position = value.tell()
        # chunks() reads from the beginning, wherever the file stands. The handler must find it as it was.
        for chunk in value.chunks():
            digest.update(chunk)
        value.seek(position)
    except (AttributeError, ValueError) as error:
        # ValueError: the file is closed, or (as io.UnsupportedOperation) can't be rewound.
        raise TypeError(
            f"The uploaded file {value.name!r} can't be read twice, so it can't be fingerprinted. Give the operation "
            "a command that stands for it."
        ) from error
    return digest.hexdigest()


# In this order: an Enum may be a str or an int as well, a datetime is a date, and a form is a dict. A subclass of a
# type that JSON makes is written as that type, by its contents.
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
    (CanonicalJSON, lambda value, write, depth: _write_text("J", value.text, write)),
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
        f"An object of type {kind.__module__}.{kind.__qualname__} can't be fingerprinted. Give the operation a command "
        "made of plain values (str, int, Decimal, datetime, UUID, dict, list, a dataclass…): for a model instance, for "
        "example, its primary key."
    )
