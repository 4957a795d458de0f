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

#: Two different numbers of at most 15 significant digits have different floats.
_EXACT_DIGITS: Final = 15
#: Below this, floats have fewer significant digits.
_SMALLEST: Final = 1e-290
#: Floats hold every whole number below this.
_EXACT_INTEGERS: Final = 2**53
#: A whole number with more digits stays a float if that is exact. Otherwise 1e308 would take 300 bytes.
_WHOLE_DIGITS: Final = 50
_WHOLE_LIMIT: Final = float(10**_WHOLE_DIGITS)

#: Replaces each digit by a zero, and each other byte by a space. A text that may contain a longer integer then contains
#: ``_LONG_INTEGER``. A regular expression would take ten times as long.
_ZEROS: Final = bytes(ord("0") if chr(code).isdecimal() else ord(" ") for code in range(256))
_LONG_INTEGER: Final = b"0" * (_WHOLE_DIGITS + 1)

#: Rounds no number that memory can hold.
_UNROUNDED: Final = Context(prec=MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX)

#: NaN, which JSON doesn't have, and the text of a number that equals no float and no int.
_Exact = tuple[float, str]


def by_value(text: str) -> float | _Exact:
    """The value of a JSON number that has a fraction or an exponent.

    :returns: for a whole number an int, or a float if it is 1e50 or more and has at most 15 significant digits. For a
        fraction a float if it has at most 15 significant digits, otherwise its exact text.
    :raises PayloadInvalidError: it is beyond the range of a float.
    """
    number = float(text)
    if math.isinf(number):
        raise PayloadInvalidError(NOT_FINITE)
    # Zeros at the end are insignificant or belong to the exponent.
    if len(text.rstrip("0")) <= _EXACT_DIGITS and abs(number) > _SMALLEST:
        if not number.is_integer() or abs(number) >= _WHOLE_LIMIT:
            return number
        return int(number) if abs(number) < _EXACT_INTEGERS else int(Decimal(text))
    try:
        exact = Decimal(text)
    except InvalidOperation:
        raise PayloadInvalidError("The payload contains a number with too large an exponent.") from None
    if not exact:
        return 0
    # The float of a whole number is whole. The float of another number may be whole, too.
    is_whole = number.is_integer() and exact == exact.to_integral_value()
    if is_whole and abs(number) < _WHOLE_LIMIT:
        return int(exact)
    written = decimal_text(exact)
    digits = written.partition("E")[0].replace(".", "").lstrip("-0")
    if len(digits) <= _EXACT_DIGITS and abs(number) > _SMALLEST:
        return number
    return int(exact) if is_whole else (math.nan, written)


def integer_by_value(text: str) -> float:
    """The value of a JSON number without a fraction or an exponent, as ``by_value`` returns it.

    :raises ValueError: it has more digits than the interpreter allows (``sys.set_int_max_str_digits``).
    """
    if len(text) > _WHOLE_DIGITS and len(text.strip("-0")) <= _EXACT_DIGITS:
        number = float(text)
        if _WHOLE_LIMIT <= abs(number) < math.inf:
            return number
    return int(text)


def decimal_text(value: Decimal) -> str:
    """Format a finite number so that equal numbers have one text."""
    return str(value.normalize(_UNROUNDED))


@dataclass(frozen=True, slots=True, repr=False)
class CanonicalJSON:
    """A JSON text in its canonical form: names sorted, no white space, one spelling for each value.

    A number that a float can't hold exactly is written as ``[NaN,"…"]``. JSON doesn't have this token.
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
        # A Python function for each integer would be slow, and few texts need it.
        decoder = _DECODER_OF_LONG_INTEGERS if _LONG_INTEGER in body.translate(_ZEROS) else _DECODER
        # A lone surrogate is valid in JSON (as an escape), but not in UTF-8.
        canonical = _ENCODER.encode(decoder.decode(text)).encode("utf-8", "surrogatepass")
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
_DECODER_OF_LONG_INTEGERS = json.JSONDecoder(
    object_pairs_hook=_parse_pairs, parse_constant=_refuse_constant, parse_float=by_value, parse_int=integer_by_value
)
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
