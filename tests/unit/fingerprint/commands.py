"""Payloads to fingerprint, and a definition of equality that is independent of the fingerprint."""

from enum import Enum
from fractions import Fraction

from hypothesis import strategies as st

from idempotency.identity.fingerprint import Payload

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters())  # lone surrogates included
)
# Few values that could collide, so that two draws are often nearly the same.
near = st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, "", "0", "1", "n", "s1:a", "a", b"", b"a"])
names = st.sampled_from(["", "a", "b", "a1", "1:a"])


def nested(leaves):
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
    )


def of(command):
    return Payload(command).request_hash


def typed(value):
    """An independent definition of equality: the value with the type of each part. All numbers have one type."""
    if isinstance(value, dict):
        return "object", frozenset((name, typed(item)) for name, item in value.items())
    if isinstance(value, list):
        return "list", tuple(typed(item) for item in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number", Fraction(repr(value))  # its text in JSON
    return type(value).__name__, value


class Colour(str, Enum):  # noqa: UP042 - payloads may have such a value
    RED = "red"
