"""``Scope``: the identity of one logical operation, and the keys derived from it for downstream calls."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from uuid import UUID

from ..exceptions import AccountInvalidError, AccountRequiredError
from ..options import validators
from .keys import shorten

#: Bounds for the text form of a derived key. With fewer than 64 bits, two keys of a busy system could be equal.
SHORTEST_TEXT = 16
LONGEST_TEXT = 64

_PURPOSE = b"django-idempotency derived key v1"

#: The form of a message's key: the trace of its chain, a dot, and the message's id.
_CARRIED = re.compile(r"([0-9a-f]{32})\.[0-9a-f-]{36}")


@dataclass(frozen=True, repr=False)
class Scope:
    """The account, the operation and the key of a request."""

    account_id: str
    operation: str
    idempotency_key: str

    def __repr__(self) -> str:
        """Contains neither the account nor the full key, because crash reports show it."""
        return f"<Scope of operation {self.operation!r}, key {shorten(self.idempotency_key)}>"

    def __str__(self) -> str:
        """The name in log lines. The beginning of the key finds the record, the trace other lines about it."""
        return f"operation {self.operation!r}, key {shorten(self.idempotency_key)}, trace {self.trace}"

    def derive_key(self, name: str) -> UUID:
        """Derive the key for one downstream call of the operation.

        The key depends only on the scope and the name. So it is the same for every attempt and retry, even after the
        record is lost, and differs between accounts that use the same client's key. It does not reveal that key.

        No secret is used, because after a rotation a provider would treat the calls of running operations as new ones.
        So anyone who guesses a client's key can compute the keys derived from it.

        :param name: names the call.
        :returns: a version 8 UUID (RFC 9562, section 5.8) made with SHA-256.
        :raises ValueError: the name is empty.
        """
        digest = bytearray(self._digest(name)[:16])
        digest[6] = 0x80 | digest[6] & 0x0F
        # Avoid the byte 0x80: MariaDB's UUID column would assume another byte order and refuse the value.
        digest[8] = 0x80 | (digest[8] & 0x3F or 1)
        return UUID(bytes=bytes(digest))

    def derive_text(self, name: str, length: int = 32) -> str:
        """Derive a key as hexadecimal digits, for a provider that doesn't accept a UUID.

        :param name: names the call.
        :param length: the number of digits, 16 to 64.
        :raises ValueError: the name is empty, or the length is not between 16 and 64.
        """
        if not SHORTEST_TEXT <= length <= LONGEST_TEXT:
            raise ValueError(f"length must be between {SHORTEST_TEXT} and {LONGEST_TEXT}, not {length}.")
        return self._digest(name).hex()[:length]

    @property
    def trace(self) -> str:
        """32 hexadecimal digits that all operations of a chain share, derived from the first operation's scope and
        passed on in the keys of messages. For logs and searches only, because a client may choose such a key."""
        carried = _CARRIED.fullmatch(self.idempotency_key)
        return carried[1] if carried else self.derive_text("trace")

    def key_for(self, message_id: UUID) -> str:
        """The key under which a consumer claims a message of this operation."""
        return f"{self.trace}.{message_id}"

    def _digest(self, name: str) -> bytes:
        if not isinstance(name, str) or not name:
            raise ValueError(f"The name of a derived key's call must be a non-empty str, not {name!r}.")
        digest = hashlib.sha256(_PURPOSE)
        for part in (self.account_id, self.operation, self.idempotency_key, name):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))  # so that concatenated parts can't collide
            digest.update(encoded)
        return digest.digest()


def scope_of(operation: str, account_id: str | None, key: str, *, source: object = "account_id") -> Scope:
    """Check the account, and make a scope with a validated key.

    :param source: the resolver or the argument that gave the account, for the error.
    :raises AccountRequiredError: there is no account.
    :raises AccountInvalidError: the account is not 1 to 255 printable characters, so its source is at fault.
    """
    if account_id is None:
        raise AccountRequiredError
    if problem := validators.name(account_id):
        given = f"a str of {len(account_id)} characters" if isinstance(account_id, str) else type(account_id).__name__
        raise AccountInvalidError(
            f"Operation {operation!r}: the account from {getattr(source, '__qualname__', source)} {problem}, not "
            f"{given}. Return None for a caller without an account, and a digest of an identifier that may be longer."
        )
    return Scope(account_id, operation, key)
