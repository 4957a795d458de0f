"""``Scope``: the identity of one logical operation, and the keys derived from it for calls further down."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from uuid import UUID

from ..exceptions import AccountRequiredError
from .keys import shorten

MAX_ACCOUNT_LENGTH = 255

#: Bounds of a derived key's text form. 16 hexadecimal digits are 64 bits: below that, two keys of a busy system meet.
SHORTEST_TEXT = 16
LONGEST_TEXT = 64

_PURPOSE = b"django-idempotency derived key v1"

#: What the key of a message looks like: the trace of its chain, a dot, and the message's id.
_CARRIED = re.compile(r"([0-9a-f]{32})\.[0-9a-f-]{36}")


@dataclass(frozen=True, repr=False)
class Scope:
    """Who asked for what under which key."""

    account_id: str
    operation: str
    idempotency_key: str

    def __repr__(self) -> str:
        """Crash reports show it, so it tells neither the account nor the whole key."""
        return f"<Scope of operation {self.operation!r}, key {shorten(self.idempotency_key)}>"

    def derive_key(self, name: str) -> UUID:
        """A key for one downstream call of the operation, ``name`` saying which.

        The same for every attempt, every retry, and even after the record is lost, because it is made of the scope
        alone. It does not reveal the client's key, and another account's equal key gives another one. A version 8 UUID
        (RFC 9562, section 5.8) over SHA-256.

        Made without a secret: one that is rotated would change the keys of operations under way, and a provider would
        see new ones. Whoever can guess a client's key can thus compute what is derived from it, as for any digest.

        :raises ValueError: the name is empty.
        """
        digest = bytearray(self._digest(name)[:16])
        digest[6] = 0x80 | digest[6] & 0x0F
        # Never 0x80 itself: MariaDB's column type for UUIDs takes that for bytes in another order, and refuses them.
        digest[8] = 0x80 | (digest[8] & 0x3F or 1)
        return UUID(bytes=bytes(digest))

    def derive_text(self, name: str, length: int = 32) -> str:
        """The same as ``length`` hexadecimal digits, for providers with limits of their own.

        :raises ValueError: the name is empty, or the length is not between 16 and 64.
        """
        if not SHORTEST_TEXT <= length <= LONGEST_TEXT:
            raise ValueError(f"length must be between {SHORTEST_TEXT} and {LONGEST_TEXT}, not {length}.")
        return self._digest(name).hex()[:length]

    @property
    def trace(self) -> str:
        """What the operations of one chain have in common, as 32 hexadecimal digits.

        Derived from the scope of the first one, and carried on in the keys of the messages that it leads to. For logs
        and searches only: a client that sends a key of that form chooses its trace, as it may choose a ``traceparent``.
        """
        carried = _CARRIED.fullmatch(self.idempotency_key)
        return carried[1] if carried else self.derive_text("trace")

    def key_for(self, message_id: UUID) -> str:
        """The key under which the consumer of a message that this operation publishes claims it."""
        return f"{self.trace}.{message_id}"

    def _digest(self, name: str) -> bytes:
        if not isinstance(name, str) or not name:
            raise ValueError(f"A derived key needs the name of the call that it is for, not {name!r}.")
        digest = hashlib.sha256(_PURPOSE)
        for part in (self.account_id, self.operation, self.idempotency_key, name):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))  # framed, so that nothing collides by concatenation
            digest.update(encoded)
        return digest.digest()


def scope_of(operation: str, account_id: str | None, key: str) -> Scope:
    """The identity of one logical operation, from parts that came from outside.

    :raises AccountRequiredError: there is no account, or its identifier can't be stored and compared as it is.
    :raises TypeError: the account resolver returned something else than a str or None.
    """
    if account_id is None:
        raise AccountRequiredError
    if not isinstance(account_id, str):
        raise TypeError(
            f"The account of operation {operation!r} must be a str or None, not {type(account_id).__name__}."
        )
    if not 0 < len(account_id) <= MAX_ACCOUNT_LENGTH or not account_id.isprintable():
        raise AccountRequiredError("The authenticated account has no usable identifier.")
    return Scope(account_id, operation, key)
