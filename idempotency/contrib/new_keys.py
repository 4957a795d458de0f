"""``report_new_keys``: finds clients that send a retry under a new key, for which no protection can help.

Such a client sends the same operation with the same payload for the same account under another key, soon after. It may
also be two operations that look alike, so it is reported and never refused. The last key of each payload is kept in
Django's cache: an index of fingerprints would cost every write of a record.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import timedelta
from typing import Any, Final

from django.core.cache import caches
from django.dispatch import Signal

from .. import signals
from ..identity.keys import shorten
from ..operation import Operation

logger: Final = logging.getLogger("idempotency")

#: Sent with ``account_id`` and ``idempotency_key`` (str), the new key. The sender is the ``Operation``.
new_key_for_same_payload: Final = Signal()


def report_new_keys(window: timedelta = timedelta(minutes=10), *, cache: str = "default") -> None:
    """Report a payload that comes under another key within ``window``: by a log line and ``new_key_for_same_payload``.

    Call it in ``ready()`` of an app. It costs one command of the cache for each first execution, and another one for a
    payload that was seen before. Nothing is reported while the cache can't be reached.

    :param cache: the alias of a cache that all processes share.
    """

    def note(sender: Operation, account_id: str, idempotency_key: str, request_hash: str, **more: Any) -> None:
        name, key = f"idempotency:{_digest(account_id, sender.name, request_hash)}", _digest(idempotency_key)
        seconds = int(window.total_seconds())
        if caches[cache].add(name, key, seconds) or caches[cache].get(name, key) == key:
            return
        caches[cache].set(name, key, seconds)
        logger.warning("Operation %r: the same payload came under a new key, %s", sender.name, shorten(idempotency_key))
        new_key_for_same_payload.send_robust(sender=sender, account_id=account_id, idempotency_key=idempotency_key)

    signals.claimed.connect(note, weak=False, dispatch_uid="idempotency.contrib.new_keys")


def _digest(*parts: str) -> str:
    """A short name for texts that a cache must not show. The last part may hold anything, the others no NUL."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
