"""No header, JSON text or form confuses the parsers.

``python -m tests.unit.test_guided`` lets coverage guide the input, by ``pip install atheris``. Its arguments are those
of libFuzzer: ``-runs=1000000 -seed=1``.
"""

import json
import sys
from decimal import Decimal
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency.exceptions import KeyInvalidError, PayloadInvalidError
from idempotency.identity import parsing
from idempotency.identity.keys import format_header, parse_header, validate_key

TEXTS = [b'"k\\""', b'{"a":1.0,"b":[1e2,{}],"a":null}', b"9007199254740993", b"-0.0e-0", b"[1.5,true]", b"b=1&a"]


def parsed(text):
    """The value of a JSON text by another way: exact numbers, which are no booleans, and the pairs of an object."""
    as_pairs = lambda pairs: ("object", dict(pairs) if len(dict(pairs)) == len(pairs) else pairs)  # noqa: E731
    number = lambda text: ("number", Decimal(text))  # noqa: E731
    return json.loads(text, parse_float=number, parse_int=number, object_pairs_hook=as_pairs)


def sent_by_another_client(text):
    """What a client of JavaScript makes of a text: it has floats alone, and no fraction for those that are whole."""
    by_float = lambda text: int(float(text)) if float(text).is_integer() else float(text)  # noqa: E731
    return json.dumps(json.loads(text, parse_float=by_float, parse_int=by_float), indent=1)


def check_key(header):
    try:
        key = parse_header(header)
    except KeyInvalidError:
        return
    assert validate_key(key) == key == parse_header(format_header(key))


def check_json(body):
    try:
        canonical = parsing.parse_json(body).text
    except PayloadInvalidError:
        return
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011 - the standard library's, for what is no JSON
            json.loads(body.decode())
        return
    again = sent_by_another_client(body)
    is_same = parsed(body) == parsed(again)
    assert (parsing.parse_json(again.encode()).text == canonical) is is_same


def check_form(body):
    pairs = parsing.form_pairs(body)
    assert parsing.form_pairs("&".join(pairs).encode("latin-1")) == pairs
    read = lambda text: sorted(parse_qsl(text, keep_blank_values=True), key=lambda pair: pair[0])  # noqa: E731
    sent = body.decode("latin-1")
    assert parsing.CSRF_FIELD in sent or read("&".join(pairs)) == read(sent)


def check(body):
    check_key(body.decode("latin-1"))
    check_json(body)
    check_form(body)


def test_what_the_parsers_make_of_bytes_is_what_others_make_of_them():
    given(st.binary() | st.sampled_from(TEXTS))(check)()
    for text in TEXTS:
        check(text)


def test_a_parser_that_tells_1_from_1_0_is_found(monkeypatch):
    monkeypatch.setattr(parsing, "_DECODER", parsing._DECODER_BY_TYPE)
    with pytest.raises(AssertionError):
        check_json(b"[1.0]")


if __name__ == "__main__":
    import atheris
    from django.conf import settings

    settings.configure()
    for module in (parsing, sys.modules[parse_header.__module__], json.decoder, json.scanner):
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__code__"):
                setattr(module, name, atheris.instrument_func(value))
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
