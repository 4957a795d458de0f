"""``claim()``: protects a block of code outside of HTTP.

It is for commands, queue consumers and GraphQL resolvers that have an account, a key and a payload.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from ..bodies import UNREADABLE, decode_body
from ..exceptions import OutcomeUnreadableError
from ..identity import keys
from ..identity.fingerprint import Payload
from ..identity.scope import scope_of
from ..operation import Operation, operation_for
from ..options.table import BlockArguments, Use
from ..outcome import Outcome, outcome_of_result
from .claim import Claim
from .claim_request import ClaimRequest, refusal_to_begin
from .execution import running
from .waiting import acquire_or_wait


class Run:
    """One run of a ``claim()`` block.

    If the operation has already run, ``replayed`` is True and ``result`` is the recorded result. Otherwise the block
    does the work and sets ``result`` to any JSON value. After the block, ``result`` is read back from JSON, as every
    later run finds it.
    """

    def __init__(self, claim: Claim | None, result: Any = None) -> None:
        self.claim = claim
        self.result = result

    @property
    def replayed(self) -> bool:
        return self.claim is None


@contextmanager
def claim(
    operation: str | Operation,
    *,
    account_id: str | None,
    key: str,
    payload: object = None,
    **policy: Unpack[BlockArguments],
) -> Iterator[Run]:
    """Make the block take effect at most once for an account and key, and record its result for later runs::

        with claim("invoices.send", account_id=account, key=key, payload=invoice) as run:
            if not run.replayed:
                run.result = send(invoice)
        use(run.result)

    With ``transaction=True`` the block runs in one transaction with the record, as a protected view does.

    :param operation: the name of the operation, or an ``Operation``.
    :param account_id: the account that the key belongs to.
    :param key: the key, 1 to 255 visible ASCII characters.
    :param payload: the content of the operation. The same key with another payload is refused.
    :param policy: keyword arguments of ``Operation.declare()`` that apply to blocks, if ``operation`` is a name.
    :returns: a context manager that yields the ``Run``.
    :raises AccountRequiredError: the account is None.
    :raises AccountInvalidError: the account is not 1 to 255 printable characters.
    :raises KeyInvalidError: the key is not 1 to 255 visible ASCII characters.
    :raises KeyExpiredError: the key is older than ``max_key_age`` and has no record.
    :raises PayloadInvalidError: the payload has no canonical form.
    :raises InProgressError: another run is in progress.
    :raises KeyReusedError: the key belongs to another payload.
    :raises OutcomeUnknownError: a run was cut off, and its outcome is unknown.
    :raises BodyGoneError: the operation has run, and its result is no longer kept.
    :raises OuterTransactionError: a transaction is open, so the claim could not be committed.
    :raises LeaseLostError: another attempt has taken over. The block's writes are rolled back.
    :raises UnavailableError: the record could not be read or written.
    :raises TransactionBrokenError: the block continued after a database error, ended its transaction itself, or left
        one open.
    :raises UnrecordableResponseError: the result is larger than ``max_response_body``. The block's writes are rolled
        back.
    :raises ImproperlyConfigured: the policy is wrong, or has an option that has no effect on a block.
    :raises TypeError: the result is not JSON, and the block's writes are rolled back; or an argument has the wrong
        type.
    """
    in_force = operation_for(operation, policy, Use.BLOCK).policy
    scope = scope_of(in_force.operation.name, account_id, keys.validate_key(key))
    request = ClaimRequest(in_force, scope, Payload(payload), refusal_to_begin(in_force, scope.idempotency_key))
    del payload, key, account_id  # a crash report would show this frame's local variables
    settled = acquire_or_wait(request)
    if isinstance(settled, Outcome):
        yield Run(None, result_of(settled))
        return
    held = Claim(settled)
    with running(held):
        run = Run(held)
        yield run
        settled.outcome = outcome = outcome_of_result(run.result, in_force)
        run.result = result_of(outcome)  # decoded from JSON, so that the first run has the result of every later one


def result_of(outcome: Outcome) -> Any:
    """The recorded result of a block.

    :raises BodyGoneError: the result is no longer kept.
    :raises OutcomeUnreadableError: the record does not hold JSON.
    """
    try:
        return json.loads(decode_body(outcome.body) or b"null")
    except UNREADABLE as error:
        raise OutcomeUnreadableError from error
