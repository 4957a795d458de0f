"""The recorded form of a response's body.

A JSON body is recorded as the exact text that was sent. Other bodies are recorded in an envelope: a JSON object that
starts with ``ENVELOPE``. So are encrypted bodies, and JSON that a database might refuse or that looks like an envelope.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from . import encryption
from .conf import settings
from .exceptions import BodyGoneError
from .identity.parsing import depth_of

ENVELOPE = '{"$idempotency-envelope":'
#: The encoding of an encrypted body. The decrypted text is encoded in turn.
FERNET = "fernet"

#: The errors that a damaged record can cause.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def encode_body(content: bytes, content_type: str) -> str:
    """Encode ``content`` as JSON text, encrypted if ``ENCRYPTION_KEYS`` is set. ``decode_body`` reverses it."""
    text = _as_json_text(content, content_type)
    return text if settings().encryption_keys is None else _envelope(FERNET, encryption.encrypt(text))


def decode_body(body: str | None) -> bytes:
    """Raises one of ``UNREADABLE`` if the text is damaged, or encrypted under an unknown key.

    :raises BodyGoneError: a purge has deleted the body.
    """
    if body is None:
        return b""
    if body == BODY_GONE:
        raise BodyGoneError
    if not body.startswith(ENVELOPE):
        return body.encode("utf-8")
    encoding, data = _open(body)
    if encoding == FERNET:
        return decode_body(encryption.decrypt(data))
    if encoding == "base64":
        return base64.b64decode(data, validate=True)
    return data.encode(encoding)


def decrypt_body(body: str | None) -> str | None:
    """The body for operators: decrypted, and without its envelope if it is text. Raises one of ``UNREADABLE``."""
    if body is None or not body.startswith(ENVELOPE):
        return body
    encoding, data = _open(body)
    if encoding == FERNET:
        return decrypt_body(encryption.decrypt(data))
    return data if encoding == "utf-8" else body


#: JSON with more levels is kept in an envelope. PostgreSQL refuses about 20,000 levels, which Python 3.14 parses.
MAX_DEPTH: Final = 1000


def _as_json_text(content: bytes, content_type: str) -> str:
    if is_json(content_type):
        try:
            text = content.decode("utf-8")
            _STRICT.decode(text)
            if content.count(b"[") + content.count(b"{") > MAX_DEPTH and depth_of(content) > MAX_DEPTH:
                raise RecursionError
        except (ValueError, RecursionError):
            pass  # a database might refuse it
        else:
            if not text.startswith(ENVELOPE):
                return text
    try:
        text = content.decode("utf-8")
        if "\x00" in text:
            raise ValueError("a text column holds no NUL")
    except ValueError:
        return _envelope("base64", base64.b64encode(content).decode("ascii"))
    return _envelope("utf-8", text)


def _envelope(encoding: str, data: str) -> str:
    return f"{ENVELOPE} {json.dumps({'encoding': encoding, 'data': data})}}}"


#: A purge writes this instead of a body. Code that doesn't know the encoding can't replay it.
BODY_GONE = _envelope("gone", "")


def _open(body: str) -> tuple[str, str]:
    (envelope,) = json.loads(body).values()
    return envelope["encoding"], envelope["data"]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


#: Refuses NaN and infinity, which are not JSON.
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)


def is_json(content_type: str) -> bool:
    """Whether a Content-Type is ``application/json`` or ends with ``+json``."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")
