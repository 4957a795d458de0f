"""Parses JSON texts, forms and query strings into the values to fingerprint.

Each parser is bounded, because it runs before the application's own parsers and their limits.

JSON has one kind of number (RFC 8259, section 6), and client libraries write the same number differently: 1, 1.0 and
1e0 are one number, and 9007199254740993 and 9007199254740992 are two. Minus zero is zero, as in RFC 8785. Numbers are
compared exactly, because two numbers may share a float.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from itertools import accumulate
from operator import itemgetter
from typing import Final
from urllib.parse import unquote_to_bytes

from django.conf import settings as django_settings
from django.core.exceptions import TooManyFieldsSent

from ..exceptions import PayloadInvalidError

# Payloads written by hand stay below 20 levels. Each level takes one of the interpreter's 1000 frames, and middleware
# has used about a hundred.
MAX_DEPTH: Final = 200

# JSON with more lists and objects is compared by its bytes. A body of 2.5 MB may have a million of them, and parsing
# takes a second. A retry usually sends the same bytes.
MAX_CONTAINERS: Final = 100_000

TOO_DEEP: Final = f"The payload is nested more than {MAX_DEPTH} levels deep."

#: The field in which Django's forms send the CSRF token. Its value differs each time the form is shown.
CSRF_FIELD: Final = "csrfmiddlewaretoken"

NOT_FINITE: Final = "The payload contains a number that is not finite."

#: A whole number of more digits keeps its spelling, because 1e308 would take 300 bytes and 1e999999999 a gigabyte.
WHOLE_DIGITS: Final = 50

#: Rounds no number that memory can hold.
_UNROUNDED: Final = Context(prec=MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX)


def by_value(text: str) -> int | tuple[float, str]:
    """The value of a JSON number that has a fraction or an exponent.

    :returns: an int if it is whole and has at most ``WHOLE_DIGITS`` digits. Otherwise NaN, which JSON doesn't have, and
        its exact text.
    :raises PayloadInvalidError: it is beyond the range of a float, so the handler would read infinity.
    """
    if math.isinf(float(text)):
        raise PayloadInvalidError(NOT_FINITE)
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise PayloadInvalidError("The payload contains a number with too large an exponent.") from None
    return int(number) if is_short_integer(number) else (math.nan, decimal_text(number))


def is_short_integer(value: Decimal) -> bool:
    """Whether a finite number is whole and has at most ``WHOLE_DIGITS`` digits, so that it is written like an int."""
    return not value or (value.adjusted() < WHOLE_DIGITS and value == value.to_integral_value())


def decimal_text(value: Decimal) -> str:
    """Format a finite number so that equal numbers have one text."""
    return str(value.normalize(_UNROUNDED))


@dataclass(frozen=True, slots=True, repr=False)
class CanonicalJSON:
    """A JSON text in its canonical form: names sorted, no white space, one spelling for each value.

    A fraction, or a whole number of more than 50 digits with an exponent, is written as ``[NaN,"…"]``. JSON has no such
    token.
    """

    text: bytes


class _RepeatedNameError(Exception):
    """An object has a name twice. Parsers disagree on which value counts (RFC 8259, section 4)."""


def parse_json(body: bytes) -> CanonicalJSON | bytes:
    """The canonical form of a JSON text, or ``body`` itself if it contains a repeated name, or more than
    ``MAX_CONTAINERS`` lists and objects.

    The standard library decodes and encodes it in C, because a loop in Python would be slow.

    :raises PayloadInvalidError: it contains NaN, a number beyond the range of a float such as 1e400, an integer of
        thousands of digits, or too many levels of nesting.
    :raises ValueError: it is not JSON in UTF-8. The caller can fingerprint the bytes instead.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers > MAX_CONTAINERS:
        return body
    text = body.decode("utf-8")
    try:
        # A lone surrogate is valid in JSON (as an escape), but not in UTF-8.
        canonical = _ENCODER.encode(_DECODER.decode(text)).encode("utf-8", "surrogatepass")
    except _RepeatedNameError:
        return body
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise PayloadInvalidError(TOO_DEEP) from None
    except ValueError:
        # An integer has more digits than the interpreter allows (sys.set_int_max_str_digits).
        raise PayloadInvalidError("The payload contains an integer with too many digits.") from None
    if containers > MAX_DEPTH and depth_of(canonical) > MAX_DEPTH:
        raise PayloadInvalidError(TOO_DEEP)
    return CanonicalJSON(canonical)


def _parse_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise _RepeatedNameError
    return parsed


def _refuse_constant(name: str) -> object:
    raise PayloadInvalidError(NOT_FINITE)


_DECODER = json.JSONDecoder(object_pairs_hook=_parse_pairs, parse_constant=_refuse_constant, parse_float=by_value)
# No circular check, because a parsed value can't contain itself.
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), check_circular=False)

_NOT_STRUCTURE = bytes(code for code in range(256) if chr(code) not in '[]{}"')
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def depth_of(text: bytes) -> int:
    """The nesting depth of a valid JSON text."""
    # Remove the quotes that don't delimit a string. A regular expression for strings would take ten times as long.
    if rb"\"" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # Adjacent quotes don't change whether the rest is inside a string.
    structure = text.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    brackets = b"".join(structure.split(b'"')[::2])
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


#: The value of a parameter, with its "=".
_VALUE = re.compile("=[^&]*")


def sorted_pairs(query: str, without: Collection[bytes] = ()) -> list[str]:
    """The parameters of a query string or a form, sorted by name. Parameters of one name keep their order.

    They stay encoded, because a handler may interpret the text differently.

    :param without: the names of parameters to omit.
    :raises TooManyFieldsSent: there are more parameters than Django accepts. Django turns this error into 400.
    """
    if not query:
        return []
    limit = django_settings.DATA_UPLOAD_MAX_NUMBER_FIELDS
    if limit is not None and query.count("&") + 1 > limit:
        raise TooManyFieldsSent("The number of GET/POST parameters exceeded settings.DATA_UPLOAD_MAX_NUMBER_FIELDS.")
    # Sort by the decoded name, because "a" and "%61" are the same name, and the order of their values counts.
    named = sorted(zip(_decoded_names(query), query.split("&"), strict=True), key=itemgetter(0))
    return [parameter for name, parameter in named if name not in without]


def _decoded_names(query: str) -> list[bytes]:
    # Decode all names at once, because ten calls for each of a thousand parameters would cost more than the rest of the
    # request.
    names = _VALUE.sub("", query).replace("+", " ")
    return list(map(_unquoted, names.split("&"))) if "%26" in names else _unquoted(names).split(b"&")


def _unquoted(text: str) -> bytes:
    # Bytes, because only the handler knows the form's character set. WSGI decodes the query as Latin-1, ASGI as UTF-8.
    try:
        return unquote_to_bytes(text.encode("latin-1"))
    except UnicodeEncodeError:
        return unquote_to_bytes(text.encode("utf-8", "surrogatepass"))


def form_pairs(body: bytes) -> list[str]:
    """The fields of a urlencoded form, as ``sorted_pairs`` without the CSRF token."""
    return sorted_pairs(body.decode("latin-1"), without={CSRF_FIELD.encode()})
