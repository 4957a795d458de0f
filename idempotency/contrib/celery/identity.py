"""Which logical operation a message is: what its headers say, and how a message gets them.

A message keeps its headers through redelivery, retry and dead letter, so whatever must outlive one delivery is a
header. They come from outside: a producer of another make may have put anything there.
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
#: Whose operation the message belongs to.
ACCOUNT_HEADER = "idempotency_account"

#: The account of a message that names none.
DEFAULT_ACCOUNT = "celery"


def headers_of(request: Any) -> dict[str, Any]:
    """The headers of a message besides Celery's own."""
    return dict(request.headers or {})


def scope_of_message(operation: str, request: Any, consumer: str | None) -> Scope:
    """The identity under which a message is consumed.

    :param consumer: a scope of the consumer's own, in place of the producer's account.
    :raises KeyInvalidError: the key is not 1 to 255 visible ASCII characters.
    :raises AccountRequiredError: the account is empty, too long or not printable.
    """
    headers = headers_of(request)
    # The id of a task survives redelivery and retry, and a publisher that sends a message twice gives it twice.
    key = keys.validate_key(headers.get(KEY_HEADER, request.id))
    account = headers.get(ACCOUNT_HEADER, DEFAULT_ACCOUNT) if consumer is None else consumer
    return scope_of(operation, account if isinstance(account, str) else None, key)


def count_of(headers: Mapping[str, Any], name: str) -> int:
    """A number that this package keeps in a header; 0 for what it can't have put there."""
    value = headers.get(name, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def carry_on_identity(sender: str = "", headers: dict[str, Any] | None = None, **others: Any) -> None:
    """Give a task that is published from within a protected operation a key derived from it.

    So an operation that is run again publishes the same message again, and all that an operation leads to has one
    trace. A key that the caller gave stays as it is. The second version of Celery's protocol only: the first has its
    headers elsewhere, and has not been the default since 2016.

    Celery logs what a receiver raises and goes on to publish, so nothing here may raise.
    """
    claim = current_claim()
    if claim is None or headers is None or "id" not in headers:
        return
    running = current_task._get_current_object() if current_task else None
    if running is not None and running.request.id == headers["id"]:
        return  # the running task's own message once more, from self.retry(): it stays what it is
    if KEY_HEADER not in headers:
        # Of the scope and not of the claim: a lost lease raises there.
        message_id = claim.scope.derive_key(claim.name_call(f"task:{sender}"))
        headers[KEY_HEADER] = claim.scope.key_for(message_id)
    headers.setdefault(ACCOUNT_HEADER, claim.scope.account_id)
