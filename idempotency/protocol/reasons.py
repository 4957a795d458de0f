"""Why something failed, as text that every database can store."""

from __future__ import annotations

from typing import Final

from .. import encryption

#: A reason is stored up to this length. Nobody reads more there.
MAX_REASON: Final = 2000  # characters


def reason_of(error: BaseException) -> str:
    """The class of an error and its message. Never raises, whatever the error's own ``__str__`` does."""
    name = type(error).__name__
    try:
        text = f"{name}: {error}"
    except Exception:  # noqa: BLE001 - the project's class may raise anything, and its name says enough
        text = name
    text = text.replace("\x00", "\ufffd")  # PostgreSQL's text can't hold NUL
    return text.encode("utf-8", "replace").decode()[:MAX_REASON]


def recorded_reason(error: BaseException) -> str:
    """The reason as a record keeps it: only the class if bodies are encrypted, because the message may quote one."""
    return type(error).__name__ if encryption.is_switched_on() else reason_of(error)
