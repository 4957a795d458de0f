"""The headers of a message: its identity and its history, and how a message gets them.

A message keeps its headers when it is redelivered, retried or dead-lettered. Headers are input from outside: another
producer may have put any value there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import current_task

from ...identity import keys
from ...identity.scope import Scope, scope_of
from ...protocol.context import current_claim

#: The key under which a consumer claims the message. Without it the message's id is the key.
KEY_HEADER = "idempotency_key"
#: The account of the operation that published the message.
ACCOUNT_HEADER = "idempotency_account"

#: How many seconds the message has waited so far.
WAITED_HEADER = "idempotency_waited"
#: Attempts of the record that don't count as cut off: attempts that ended, and attempts before the message became a
#: dead letter.
ATTEMPTS_HEADER = "idempotency_attempts"
#: Whether a delivery of this message was cut off. The broker marks only the next delivery, so the header keeps the
#: mark.
REDELIVERED_HEADER = "idempotency_redelivered"

#: The account of a message that names none.
DEFAULT_ACCOUNT = "celery"


def headers_of(request: Any) -> dict[str, Any]:
    """A copy of the headers of a message without those of Celery."""
    return dict(request.headers or {})


def scope_of_message(operation: str, request: Any, consumer: str | None) -> Scope:
    """The identity under which the message of a running task is consumed.

    :raises KeyInvalidError: the key is not 1 to 255 visible ASCII characters.
    :raises AccountRequiredError: the account is empty, too long or not printable.
    """
    headers = headers_of(request)
    # A task keeps its id when it is redelivered or retried.
    key = keys.validate_key(headers.get(KEY_HEADER, request.id))
    account = headers.get(ACCOUNT_HEADER, DEFAULT_ACCOUNT) if consumer is None else consumer
    return scope_of(operation, account if isinstance(account, str) else None, key)


def count_of(headers: Mapping[str, Any], name: str) -> int:
    """Read a number that this package keeps in a header. A value that it can't have written counts as 0."""
    value = headers.get(name, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def carry_on_identity(sender: str = "", headers: dict[str, Any] | None = None, **others: Any) -> None:
    """Give a task that a protected operation publishes a key that is derived from the operation's scope.

    So an operation that runs again publishes the same message again. A key that the caller has set is kept. Version 1
    of Celery's message protocol, which was the default until 2016, keeps its headers elsewhere.

    Nothing here may raise: if a receiver raises, Celery logs the error and publishes the message without a key.
    """
    claim = current_claim()
    if claim is None or headers is None or "id" not in headers:
        return
    running = current_task._get_current_object() if current_task else None
    if running is not None and running.request.id == headers["id"]:
        return  # self.retry() publishes the running task's own message again, which keeps its identity
    if KEY_HEADER not in headers:
        # Use the scope's derive_key(), because the claim's raises an error if the lease is lost.
        message_id = claim.scope.derive_key(claim.name_call(f"task:{sender}"))
        headers[KEY_HEADER] = claim.scope.key_for(message_id)
    headers.setdefault(ACCOUNT_HEADER, claim.scope.account_id)
