"""What a client sent, as the value to fingerprint: JSON texts, forms and query strings.

Each parser has a bound, because it runs before the application's own parsers and their limits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from typing import Final
from urllib.parse import unquote_to_bytes

from django.conf import settings as django_settings
from django.core.exceptions import TooManyFieldsSent

from ..exceptions import PayloadInvalidError

# How deep a payload may nest. Payloads written by hand stay below 20. One level takes one frame of the interpreter's
# 1000 (by default), of which a request through a stack of middleware has used about a hundred when it comes here.
MAX_DEPTH: Final = 200

# How many lists and objects a JSON text may hold to be compared by what it says. A body of 2.5 MB has room for a
# million, which cost a second. A retry is usually the same text, byte for byte.
MAX_CONTAINERS: Final = 100_000

TOO_DEEP: Final = f"The payload is nested more than {MAX_DEPTH} levels deep."
NOT_FINITE: Final = "The payload holds a number that is not finite."

#: The field in which Django's forms send the CSRF token. It is masked anew each time that the form is shown.
CSRF_FIELD: Final = "csrfmiddlewaretoken"


@dataclass(frozen=True, slots=True, repr=False)
class CanonicalJSON:
    """A JSON text in its canonical form: names sorted, no white space, one spelling for each value.

    Two kinds of value have no spelling of their own in JSON. They are written as lists that start with a token that
    JSON doesn't have: ``[NaN,"…"]`` is a number that no float holds, ``[Infinity,[name,value],…]`` an object that
    has a name twice.
    """

    text: str


def parse_json(body: bytes) -> CanonicalJSON | bytes:
    """A JSON text in its canonical form, or the text itself if it has more than ``MAX_CONTAINERS``.

    Both passes are the standard library's in C, because a pass in Python over a hundred thousand containers takes long.

    :raises PayloadInvalidError: Python can't hold it faithfully: NaN, 1e400, an integer of thousands of digits, absurd
        nesting.
    :raises ValueError: it is not JSON in UTF-8 at all. It can still be fingerprinted as the bytes that it is.
    """
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        return body
    text = body.decode("utf-8")
    try:
        canonical = _ENCODER.encode(_DECODER.decode(text))
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise PayloadInvalidError(TOO_DEEP) from None
    except ValueError:
        # The interpreter's limit on the digits of an integer (sys.set_int_max_str_digits).
        raise PayloadInvalidError("The payload holds an integer with too many digits.") from None
    if _depth(canonical) > MAX_DEPTH:
        raise PayloadInvalidError(TOO_DEEP)
    return CanonicalJSON(canonical)


def _parse_pairs(pairs: list[tuple[str, object]]) -> object:
    # Parsers disagree on which of two equal names counts (RFC 8259, section 4), so such an object equals only one with
    # the same pairs in the same order.
    parsed = dict(pairs)
    return parsed if len(parsed) == len(pairs) else [math.inf, *pairs]


#: A number of at most 15 significant digits is told apart from every other such number by its float.
_EXACT_DIGITS: Final = 15
#: Below this, floats have fewer digits, and in the end none.
_SMALLEST: Final = 1e-290


def _parse_float(text: str) -> object:
    number = float(text)
    if math.isinf(number):
        raise PayloadInvalidError(NOT_FINITE)
    if len(text) <= _EXACT_DIGITS and abs(number) > _SMALLEST:
        return number
    # A parser that makes a float of it takes 9007199254740992.5 and 9007199254740993.0 for one number. Others don't.
    try:
        exact = Decimal(text)
    except InvalidOperation:
        raise PayloadInvalidError("The payload holds a number with an absurd exponent.") from None
    if exact == Decimal(float.__repr__(number)):
        return number
    return [math.nan, decimal_text(exact)]


def decimal_text(value: Decimal) -> str:
    """The one spelling of a finite number: 1.0 and 1.00 are one. ``Decimal.normalize()`` would round."""
    sign, digits, exponent = value.as_tuple()
    written = "".join(map(str, digits)).lstrip("0")
    significant = written.rstrip("0")
    scale = int(exponent) + len(written) - len(significant) if significant else 0
    return f"{'-' if sign else ''}{significant}e{scale}"


def _refuse_constant(name: str) -> object:
    raise PayloadInvalidError(NOT_FINITE)


_DECODER = json.JSONDecoder(object_pairs_hook=_parse_pairs, parse_float=_parse_float, parse_constant=_refuse_constant)
# What it is given was parsed a moment ago, so nothing in it contains itself.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False)

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NOT_BRACKETS = bytes(code for code in range(128) if chr(code) not in "[]{}")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def _depth(canonical: str) -> int:
    """How deep a JSON text nests, or an upper bound that is small enough."""
    bound = canonical.count("[") + canonical.count("{")
    if bound <= MAX_DEPTH:
        return bound
    brackets = _STRING.sub("", canonical).encode("ascii").translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def sorted_pairs(query: str, without: Collection[bytes] = ()) -> list[str]:
    """The parameters of a query string or a form, ordered by name. Those of one name keep the order they were sent in.

    They stay encoded, because a handler may read the text as something else than parameters.

    :param without: names that don't count.
    :raises TooManyFieldsSent: there are more than Django itself accepts. Django answers it with 400.
    """
    if not query:
        return []
    limit = django_settings.DATA_UPLOAD_MAX_NUMBER_FIELDS
    if limit is not None and query.count("&") + 1 > limit:
        raise TooManyFieldsSent("The number of GET/POST parameters exceeded settings.DATA_UPLOAD_MAX_NUMBER_FIELDS.")
    # By the decoded name, because "a" and "%61" are one: the order of their values counts.
    named = [(_decoded_name(parameter), parameter) for parameter in query.split("&")]
    return [parameter for name, parameter in sorted(named, key=lambda pair: pair[0]) if name not in without]


def _decoded_name(parameter: str) -> bytes:
    # Bytes, because the character set of a form is its handler's business. WSGI gives bytes as Latin-1, ASGI as UTF-8.
    name = parameter.partition("=")[0].replace("+", " ")
    try:
        return unquote_to_bytes(name.encode("latin-1"))
    except UnicodeEncodeError:
        return unquote_to_bytes(name.encode("utf-8", "surrogatepass"))


def form_pairs(body: bytes) -> list[str]:
    """The fields of a urlencoded form, as ``sorted_pairs`` gives them, without the CSRF token.

    :raises TooManyFieldsSent: there are more than Django itself accepts.
    """
    return sorted_pairs(body.decode("latin-1"), without={CSRF_FIELD.encode()})
