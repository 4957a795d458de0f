"""Numbers by their value: 1, 1.0 and 1e0 are one number, and 9007199254740993 and 9007199254740992 are two.

JSON has one kind of number (RFC 8259, section 6), and client libraries write the same one differently. Minus zero is
zero, as in RFC 8785. A number is compared as exactly as it was sent, because two numbers may share a float. A long
number is written with an exponent, so that a short text can't become a long one.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Final

from ..exceptions import PayloadInvalidError

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

#: Whether a text may hold a whole number with more digits, in the only spelling that Python's parser reads as an int.
has_long_integers = re.compile(rf"\d{{{_WHOLE_DIGITS + 1}}}").search

#: What JSON can't hold, and so stands for a number that no float or short int is equal to.
_Exact = tuple[float, str]


def by_value(text: str) -> float | _Exact:
    """The value of a JSON number that has a fraction or an exponent: an int if it is whole, otherwise a float.

    :returns: for a number that no float holds, or a long whole one, the list ``[NaN, text]``.
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
    return number if abs(number) < _WHOLE_LIMIT else (math.nan, decimal_text(Decimal(text)))


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
    """Write a finite number so that equal numbers, such as 1.0 and 1.00, have one text.

    ``Decimal.normalize()`` is not used because it rounds.
    """
    sign, digits, exponent = value.as_tuple()
    written = "".join(map(str, digits)).lstrip("0")
    significant = written.rstrip("0")
    scale = int(exponent) + len(written) - len(significant) if significant else 0
    return f"{'-' if sign else ''}{significant}e{scale}"
