"""Encryption at rest, under ``ENCRYPTION_KEYS``. It needs the extra ``encryption``.

Fernet authenticates, so text that was changed in the database or encrypted under another key can't be decrypted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .conf import settings

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet


def encrypt(text: str) -> str:
    """Encrypt a text under the first key, as ASCII."""
    return _cipher(tuple(settings().encryption_keys or ())).encrypt(text.encode("utf-8")).decode("ascii")


def decrypt(token: str) -> str:
    """:raises ValueError: the text's key is not among ``ENCRYPTION_KEYS``, or the text was changed."""
    keys = settings().encryption_keys
    if keys is None:
        raise ValueError("The recorded text is encrypted, and ENCRYPTION_KEYS is not set.")
    from cryptography.fernet import InvalidToken

    try:
        return _cipher(tuple(keys)).decrypt(token.encode("ascii")).decode("utf-8")
    except InvalidToken:
        raise ValueError(
            "The recorded text can't be decrypted: its key is not among ENCRYPTION_KEYS, or the text was changed."
        ) from None


@lru_cache(maxsize=1)
def _cipher(keys: Sequence[str | bytes]) -> MultiFernet:
    from cryptography.fernet import Fernet, MultiFernet

    return MultiFernet([Fernet(key) for key in keys])
