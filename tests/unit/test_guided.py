"""No header, JSON text or form is misread by the parsers. Independent parsers of the same bytes are the reference.

``python -m tests.unit.test_guided`` generates bytes guided by coverage. It needs ``pip install atheris`` and takes
libFuzzer's arguments: ``-runs=1000000 -seed=1``.
"""

import json
import re
import sys
from decimal import Decimal
from operator import itemgetter
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency.exceptions import KeyInvalidError, PayloadInvalidError
from idempotency.identity import keys, parsing

TEXTS = [b'"k\\""', b'{"a":1.0,"b":[1e2,{}],"a":null}', b"9007199254740993", b"-0.0e-0", b"[1.5,true]", b"a=1&%61=2"]


#: An integer with more digits than those that are compared with a number that has an exponent.
LONG = re.compile(rb"\d{%d}" % (parsing.WHOLE_DIGITS + 1))


def exact(text):
    return "number", Decimal(text)  # never equal to a boolean


def without_loss(pairs):
    names = dict(pairs)
    return "object", names if len(names) == len(pairs) else pairs


def value_of(text):
    """The value of a JSON text: exact numbers, and all pairs of an object."""
    return json.loads(text, parse_float=exact, parse_int=exact, object_pairs_hook=without_loss)


def number_of_javascript(text):
    number = float(text)
    return int(number) if abs(number) < 1e21 and number.is_integer() else number


def sent_again(text):
    """The text as a JavaScript client sends it again: all numbers are floats, shorter whole ones without a fraction."""
    return json.dumps(json.loads(text, parse_float=number_of_javascript, parse_int=number_of_javascript), indent=1)


def fields_of(text):
    """The fields of a form. Fields with the same name keep their order."""
    return sorted(parse_qsl(text, keep_blank_values=True, encoding="latin-1"), key=itemgetter(0))


def check_key(header):
    try:
        key = keys.parse_header(header)
    except KeyInvalidError:
        return
    assert keys.validate_key(key) == key == keys.parse_header(keys.format_header(key))


def check_json(body):
    try:
        canonical = parsing.parse_json(body)
    except PayloadInvalidError:
        return
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            json.loads(body.decode())
        return
    again = sent_again(body)
    is_same, is_equal = parsing.parse_json(again.encode()) == canonical, value_of(body) == value_of(again)
    assert is_same is is_equal or (is_equal and LONG.search(body))


def check_form(body):
    sent = body.decode("latin-1")
    pairs = parsing.form_pairs(body)
    assert parsing.form_pairs("&".join(pairs).encode("latin-1")) == pairs
    if parsing.CSRF_FIELD not in dict(fields_of(sent)):
        assert fields_of("&".join(pairs)) == fields_of(sent)


def check(body):
    check_key(body.decode("latin-1"))
    check_json(body)
    check_form(body)


def check_texts():
    for text in TEXTS:
        check(text)


def test_the_parsers_agree_with_independent_parsers():
    given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))(check)()
    check_texts()


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (parsing, "_DECODER", json.JSONDecoder()),  # distinguishes 1 from 1.0
        (parsing, "_unquoted", str.encode),  # doesn't decode %61 to a
        (keys, "_ESCAPED", re.compile("(_)")),  # leaves the backslash before a quote
    ],
)
def test_a_broken_parser_is_detected(monkeypatch, module, name, broken):
    monkeypatch.setattr(module, name, broken)
    with pytest.raises((AssertionError, KeyInvalidError)):
        check_texts()


if __name__ == "__main__":
    import atheris
    from django.conf import settings

    settings.configure()
    for module in (parsing, keys, json.decoder, json.scanner):
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__code__"):
                setattr(module, name, atheris.instrument_func(value))
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
