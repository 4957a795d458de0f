"""The names that ``idempotency`` offers."""

from __future__ import annotations

import pytest

import idempotency


def test_the_public_names_are_complete() -> None:
    for name in idempotency.__all__:
        assert getattr(idempotency, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = idempotency.nonsense
