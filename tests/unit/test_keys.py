"""What is a key and what is not, in a header and at the function's entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idempotency.exceptions import KeyInvalidError
from idempotency.identity.keys import HEADER, MAX_LENGTH, META_NAME, parse_header, shorten, validate_key

VISIBLE = "".join(map(chr, range(0x21, 0x7F)))

visible_keys = st.text(alphabet=VISIBLE, min_size=1, max_size=MAX_LENGTH)
bare_keys = st.text(alphabet=VISIBLE.translate({ord(c): None for c in ',;"'}), min_size=1, max_size=MAX_LENGTH)


def quoted(key: str) -> str:
    """A key as RFC 9651 writes a string (section 4.1.6)."""
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_the_meta_name_is_what_django_makes_of_the_header() -> None:
    assert "HTTP_" + HEADER.upper().replace("-", "_") == META_NAME


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("abc", "abc"),
        ('"abc"', "abc"),
        ("  abc\t", "abc"),
        (' \t"abc" ', "abc"),
        ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        ('"a,b"', "a,b"),
        ('"a;b"', "a;b"),
        (r'"a\"b"', 'a"b'),
        (r'"a\\b"', r"a\b"),
        (r"a\b", r"a\b"),
        ("x" * 255, "x" * 255),
        ('"' + "x" * 255 + '"', "x" * 255),
        (quoted('"' * 255), '"' * 255),
        ("?1", "?1"),
        (":YWJj:", ":YWJj:"),
    ],
)
def test_a_key_is_read_bare_or_quoted(value: str, key: str) -> None:
    assert parse_header(value) == key


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "\t",
        '""',
        '"',
        '"abc',
        'abc"',
        'a"c',
        '"a"b"',
        '"a" "b"',
        "a b",
        '"a b"',
        '" "',
        "a,b",
        "a, b",
        ",",
        "a,",
        '"a","b"',
        '"a", "b"',
        '"abc";v=1',
        '"abc"; v=1',
        "abc;v=1",
        "abc;",
        r'"a\bc"',
        '"abc\\"',
        "x" * 256,
        '"' + "x" * 256 + '"',
        quoted('"' * 256),
        "a\tb",
        "a\r\n b",
        "abc\n",
        "\nabc",
        "abc\x00",
        "\x00",
        "\x7f",
        "clé",
        "clé".encode().decode("latin-1"),
        "\xa0abc",
        "\u2003abc",
        "\ud800",
        "\uff11\uff12\uff13",  # digits, but not ASCII ones
        "🔑",
    ],
    ids=ascii,
)
def test_any_other_value_is_refused(value: str) -> None:
    with pytest.raises(KeyInvalidError):
        parse_header(value)


@pytest.mark.parametrize("value", [None, 1, b"abc", ["abc"], object()])
def test_what_is_not_text_is_refused_as_a_key_too(value: object) -> None:
    with pytest.raises(KeyInvalidError):
        parse_header(value)  # type: ignore[arg-type]
    with pytest.raises(KeyInvalidError):
        validate_key(value)


@given(visible_keys)
def test_every_visible_key_survives_quoting(key: str) -> None:
    assert parse_header(quoted(key)) == key


@given(bare_keys)
def test_bare_and_quoted_forms_are_one_key(key: str) -> None:
    assert parse_header(key) == parse_header(quoted(key)) == key


@given(st.text())
def test_any_text_is_a_key_or_refused(value: str) -> None:
    try:
        key = parse_header(value)
    except KeyInvalidError:
        return
    assert validate_key(key) == key


@given(st.lists(visible_keys.filter(lambda key: key[0] != '"'), min_size=2, max_size=3), st.sampled_from([",", ", "]))
def test_headers_that_a_server_joined_are_refused(keys: list[str], joint: str) -> None:
    for spelling in (keys, [quoted(key) for key in keys]):
        with pytest.raises(KeyInvalidError):
            parse_header(joint.join(spelling))


@given(visible_keys)
def test_the_function_entry_takes_every_visible_key(key: str) -> None:
    assert validate_key(key) == key


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "a\n", "\x00", "\ud800", "é"], ids=ascii)
def test_the_function_entry_refuses_what_is_not_visible_ascii(key: str) -> None:
    with pytest.raises(KeyInvalidError):
        validate_key(key)


def test_a_subclass_of_str_becomes_plain_text() -> None:
    class Shouting(str):
        __slots__ = ()

        def __str__(self) -> str:
            return self.upper()

    key = validate_key(Shouting("abc"))
    assert type(key) is str
    assert key == "abc"


@given(visible_keys)
def test_a_shortened_key_shows_at_most_half_of_it(key: str) -> None:
    shown, _, length = shorten(key).rpartition("… ")
    assert key.startswith(shown)
    assert len(shown) <= min(8, len(key) / 2)
    assert length == f"({len(key)} characters)"


def test_a_shortened_key_can_be_found_by_what_it_shows() -> None:
    assert shorten("8e03978e-40d5-43dd-bc93-6894a57f9324") == "8e03978e… (36 characters)"
