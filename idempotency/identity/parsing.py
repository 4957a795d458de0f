"""Parses JSON texts, forms and query strings into the values that are fingerprinted.

Each parser is bounded, because it runs before the application's own parsers and their limits.

JSON has one kind of number (RFC 8259, section 6), and client libraries write the same one differently: 1, 1.0 and 1e0
are one number, and 9007199254740993 and 9007199254740992 are two. Minus zero is zero, as in RFC 8785. A number is
compared as exactly as it was sent, because two numbers may share a float. A long number is written with an exponent, so
that a short text can't become a long one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Final
from urllib.parse import unquote_to_bytes

from django.conf import settings as django_settings
from django.core.exceptions import TooManyFieldsSent

from ..exceptions import PayloadInvalidError

# The number of levels to which a payload may nest. Payloads written by hand stay below 20. Each level takes one of the
# interpreter's 1000 frames (by default), and a request has used about a hundred for middleware when it arrives here.
MAX_DEPTH: Final = 200

# A JSON text with more lists and objects than this is compared byte by byte and not by its values. A body of 2.5 MB may
# hold a million, and parsing them takes a second. A retry usually sends the same bytes.
MAX_CONTAINERS: Final = 100_000

TOO_DEEP: Final = f"The payload is nested more than {MAX_DEPTH} levels deep."

#: The field in which Django's forms send the CSRF token. Its value differs each time the form is shown.
CSRF_FIELD: Final = "csrfmiddlewaretoken"

NOT_FINITE: Final = "The payload holds a number that is not finite."

#: Two different numbers of at most 15 significant digits have different floats.
_EXACT_DIGITS: Final = 15
#: Below this, floats have fewer significant digits.
_SMALLEST: Final = 1e-290
#: A whole number with more digits is written as its significant digits and an exponent.
_WHOLE_DIGITS: Final = 16
_WHOLE_LIMIT: Final = 10**_WHOLE_DIGITS
#: A Decimal with more digits before its point than any float has is not written as an integer.
_FLOAT_DIGITS: Final = 310

#: Replaces each digit by a zero, and each other byte by a space. Then a text that may hold a whole number with more
#: digits contains ``_LONG_INTEGER``. A regular expression would take ten times as long.
_ZEROS: Final = bytes(ord("0") if chr(code).isdecimal() else ord(" ") for code in range(256))
_LONG_INTEGER: Final = b"0" * (_WHOLE_DIGITS + 1)

#: A list that JSON can't hold. It stands for a number that no float or short int is equal to.
_Exact = tuple[float, str]


def by_value(text: str) -> float | _Exact:
    """The value of a JSON number that has a fraction or an exponent: an int if it is whole, otherwise a float; or the
    list ``[NaN, text]`` if no float holds it, or if it is whole and long.

    :raises PayloadInvalidError: it is beyond the range of a float.
    """
    parsed = by_type(text)
    if isinstance(parsed, float):
        if not parsed.is_integer():
            return parsed
        if abs(parsed) < _WHOLE_LIMIT:
            return int(parsed)
        return math.nan, decimal_text(Decimal(float.__repr__(parsed)))
    exact = Decimal(parsed[1])
    return int(exact) if exact.adjusted() < _WHOLE_DIGITS and exact == exact.to_integral_value() else parsed


def integer_by_value(text: str) -> int | _Exact:
    """The value of a JSON number without a fraction and an exponent, as ``by_value`` gives it.

    :raises ValueError: it has more digits than the interpreter allows (``sys.set_int_max_str_digits``).
    """
    number = int(text)
    if abs(number) < _WHOLE_LIMIT:
        return number
    significant = text.rstrip("0")
    return math.nan, f"{significant}e{len(text) - len(significant)}"  # as ``decimal_text`` writes it


def by_type(text: str) -> float | _Exact:
    """As ``by_value``, but a whole number stays a float if it is written as one, as in fingerprints of ``v1``."""
    number = float(text)
    if math.isinf(number):
        raise PayloadInvalidError(NOT_FINITE)
    if len(text) <= _EXACT_DIGITS and abs(number) > _SMALLEST:
        return number
    # As floats, 9007199254740992.5 and 9007199254740993.0 are equal. Another parser, such as Decimal, tells them apart.
    try:
        exact = Decimal(text)
    except InvalidOperation:
        raise PayloadInvalidError("The payload holds a number with too large an exponent.") from None
    if exact == Decimal(float.__repr__(number)):
        return number
    return math.nan, decimal_text(exact)


def whole(exact: Decimal) -> int | None:
    """A finite number as an int, or None if it is not a whole number or has too many digits."""
    if not exact:
        return 0
    return int(exact) if exact.adjusted() < _FLOAT_DIGITS and exact == exact.to_integral_value() else None


def decimal_text(value: Decimal) -> str:
    """Write a finite number so that equal numbers have one text. ``Decimal.normalize()`` would round."""
    sign, digits, exponent = value.as_tuple()
    written = "".join(map(str, digits)).lstrip("0")
    significant = written.rstrip("0")
    scale = int(exponent) + len(written) - len(significant) if significant else 0
    return f"{'-' if sign else ''}{significant}e{scale}"


@dataclass(frozen=True, slots=True, repr=False)
class CanonicalJSON:
    """A JSON text in its canonical form: names sorted, no white space, one spelling for each value.

    Python's parser would lose two kinds of value. They are written as lists that start with a token that JSON doesn't
    have: ``[NaN,"…"]`` stands for a number that a float can't hold exactly or that has many digits before its point,
    and ``[Infinity,[name,value],…]`` for an object in which a name occurs twice.
    """

    text: str
    sent: str

    def by_type(self) -> str:
        """The canonical form in which 1 and 1.0 differ, as in fingerprints of ``v1``."""
        return _ENCODER.encode(_DECODER_BY_TYPE.decode(self.sent))


def parse_json(body: bytes) -> CanonicalJSON | bytes:
    """The canonical form of a JSON text, or ``body`` itself if it has more than ``MAX_CONTAINERS`` lists and objects.

    The standard library decodes and encodes it in C, because a loop in Python would take long.

    :raises PayloadInvalidError: Python can't represent it exactly: NaN, 1e400, an integer of thousands of digits, or
        too many levels of nesting.
    :raises ValueError: it is not JSON in UTF-8. The caller can fingerprint the bytes instead.
    """
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        return body
    text = body.decode("utf-8")
    try:
        # A function for each integer would make the parser slow, and few texts hold one that needs it.
        decoder = _DECODER_OF_LONG_INTEGERS if _LONG_INTEGER in body.translate(_ZEROS) else _DECODER
        canonical = _ENCODER.encode(decoder.decode(text))
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise PayloadInvalidError(TOO_DEEP) from None
    except ValueError:
        # An integer has more digits than the interpreter allows (sys.set_int_max_str_digits).
        raise PayloadInvalidError("The payload holds an integer with too many digits.") from None
    if depth_of(canonical, MAX_DEPTH) > MAX_DEPTH:
        raise PayloadInvalidError(TOO_DEEP)
    return CanonicalJSON(canonical, text)


def _parse_pairs(pairs: list[tuple[str, object]]) -> object:
    # If an object has a name twice, parsers disagree on which value counts (RFC 8259, section 4). So such an object is
    # equal only to an object with the same pairs in the same order.
    parsed = dict(pairs)
    return parsed if len(parsed) == len(pairs) else [math.inf, *pairs]


def _refuse_constant(name: str) -> object:
    raise PayloadInvalidError(NOT_FINITE)


_decoder = partial(json.JSONDecoder, object_pairs_hook=_parse_pairs, parse_constant=_refuse_constant)
_DECODER = _decoder(parse_float=by_value)
_DECODER_OF_LONG_INTEGERS = _decoder(parse_float=by_value, parse_int=integer_by_value)
_DECODER_BY_TYPE = _decoder(parse_float=by_type)
# No circular check, because the value was just parsed from a text and so can't contain itself.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)

_NOT_BRACKETS = bytes(code for code in range(128) if chr(code) not in "[]{}")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def depth_of(text: str, limit: int) -> int:
    """The nesting depth of a valid JSON text, or an upper bound if that is not above ``limit``."""
    bound = text.count("[") + text.count("{")
    if bound <= limit:
        return bound
    # A regular expression for strings would take ten times as long.
    if r"\"" in text:
        text = text.replace(r"\\", "").replace(r"\"", "")
    outside_strings = "".join(text.split('"')[::2])
    brackets = outside_strings.encode("ascii").translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


#: The value of a parameter, with its "=".
_VALUE = re.compile("=[^&]*")


def sorted_pairs(query: str, without: Collection[bytes] = ()) -> list[str]:
    """The parameters of a query string or a form, sorted by name. Parameters of one name keep their order.

    They stay encoded, because a handler may read the text as something else than parameters.

    :param without: the names of parameters to leave out.
    :raises TooManyFieldsSent: there are more parameters than Django itself accepts. Django turns this error into 400.
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
    # All at once: ten calls for each of a thousand parameters would be more than the rest of the request makes.
    names = _VALUE.sub("", query).replace("+", " ")
    return list(map(_unquoted, names.split("&"))) if "%26" in names else _unquoted(names).split(b"&")


def _unquoted(text: str) -> bytes:
    # Compare bytes, because only the handler knows the character set of a form. WSGI decodes the query string as
    # Latin-1, ASGI as UTF-8.
    try:
        return unquote_to_bytes(text.encode("latin-1"))
    except UnicodeEncodeError:
        return unquote_to_bytes(text.encode("utf-8", "surrogatepass"))


def form_pairs(body: bytes) -> list[str]:
    """The fields of a urlencoded form as ``sorted_pairs``, without the CSRF token."""
    return sorted_pairs(body.decode("latin-1"), without={CSRF_FIELD.encode()})
