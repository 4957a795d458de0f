"""The headers of a message: its identity and its history.

A message keeps its headers when it is redelivered, retried or dead-lettered. Other producers may set any values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import current_task

from ...conf import require_app
from ...foreign import behind_proxy
from ...identity import keys
from ...identity.scope import Scope, scope_of
from ...options import validators
from ...protocol.context import current_claim

require_app("idempotency.contrib.celery")

#: The key under which a consumer claims the message; by default the message's id.
KEY_HEADER = "idempotency_key"
#: The account of the operation that published the message.
ACCOUNT_HEADER = "idempotency_account"

#: How many seconds the message has waited so far.
WAITED_HEADER = "idempotency_waited"
#: The record's attempts that don't count as cut off: attempts that ended, and attempts before a dead letter.
ATTEMPTS_HEADER = "idempotency_attempts"
#: Preserves the broker's redelivery mark, which only the next delivery has.
REDELIVERED_HEADER = "idempotency_redelivered"

#: The account of a message without one.
DEFAULT_ACCOUNT = "celery"


def headers_of(request: Any) -> dict[str, Any]:
    """A copy of a message's headers, without Celery's headers."""
    return dict(request.headers or {})


def scope_of_message(operation: str, request: Any, consumer: str | None) -> Scope:
    """The scope under which the message of a running task is consumed.

    :raises KeyInvalidError: the key is not 1 to 255 visible ASCII characters.
    :raises AccountRequiredError: the account is not 1 to 255 printable characters.
    """
    headers = headers_of(request)
    # A task keeps its id when it is redelivered or retried.
    key = keys.validate_key(headers.get(KEY_HEADER, request.id))
    account = headers.get(ACCOUNT_HEADER, DEFAULT_ACCOUNT) if consumer is None else consumer
    # Another producer may have written any header. That is the message's fault, so it is dead-lettered.
    return scope_of(operation, None if validators.name(account) else account, key)


def count_of(headers: Mapping[str, Any], name: str) -> int:
    """Read a count from a header. A value that this package can't have written is read as 0."""
    value = headers.get(name, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def carry_on_identity(sender: str = "", headers: dict[str, Any] | None = None, **others: Any) -> None:
    """Give a task that a protected operation publishes a key derived from the operation's scope.

    An operation that runs again publishes the same message again. A key set by the caller is kept. Version 1 of
    Celery's message protocol is skipped, because it stores its headers elsewhere.

    Must not raise: Celery would log the error and publish the message without a key.
    """
    claim = current_claim()
    if claim is None or headers is None or "id" not in headers:
        return
    running = behind_proxy(current_task) if current_task else None
    if running is not None and running.request.id == headers["id"]:
        return  # self.retry() republishes the running task's message, which keeps its identity
    if KEY_HEADER not in headers:
        # The scope's derive_key(), because the claim's raises if the lease is lost.
        message_id = claim.scope.derive_key(claim.name_call(f"task:{sender}"))
        headers[KEY_HEADER] = claim.scope.key_for(message_id)
    headers.setdefault(ACCOUNT_HEADER, claim.scope.account_id)
