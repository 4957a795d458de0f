"""``claim()``: a block of code as one logical operation, outside of HTTP.

For commands, queue consumers, GraphQL resolvers: whatever knows an account, a key and a payload.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..exceptions import OutcomeUnreadableError
from ..identity import keys
from ..identity.fingerprint import Payload
from ..identity.scope import scope_of
from ..operation import Operation, operation_for
from ..options.table import OperationPolicy
from ..outcome import Outcome, outcome_of_result
from .claim import Claim
from .execution import acquire_or_wait, running

if TYPE_CHECKING:  # Python 3.10 has no Unpack, and only a type checker reads it
    from typing_extensions import Unpack


class Run:
    """One pass through a ``claim()`` block.

    ``replayed`` is True when the operation has run already; ``result`` is then what that run left. Otherwise the
    block does the work and sets ``result`` to anything that JSON can hold.
    """

    def __init__(self, claim: Claim | None, result: Any = None) -> None:
        self.claim = claim
        self.result = result

    @property
    def replayed(self) -> bool:
        return self.claim is None


@contextmanager
def claim(
    operation: str | Operation, *, account_id: str, key: str, payload: object = None, **policy: Unpack[OperationPolicy]
) -> Iterator[Run]:
    """Run the block at most once for an account and key, and keep its result for every further pass::

        with claim("invoices.send", account_id=account, key=key, payload=invoice) as run:
            if not run.replayed:
                run.result = send(invoice)
        use(run.result)

    With ``transaction=True`` the block is one transaction with the record, as a protected view is.

    :param payload: what the key stands for; the same key with another payload is refused.
    :param policy: the keyword arguments of ``Operation``, when ``operation`` is a name.
    :raises KeyInvalidError: the key is not 1 to 255 visible ASCII characters.
    :raises PayloadInvalidError: the payload has no canonical form.
    :raises InProgressError: another pass is under way.
    :raises KeyReusedError: the key belongs to another payload.
    :raises OutcomeUnknownError: a pass was cut off and nobody knows how it ended.
    :raises LeaseLostError: this pass was taken over; its writes are rolled back.
    :raises UnavailableError: the record could not be read or written.
    :raises TypeError: the result is not JSON; the block's writes are rolled back.
    """
    declared = operation_for(operation, policy)
    scope = scope_of(declared.name, account_id, keys.validate_key(key))
    wrapped = Payload(payload)
    del payload, key, account_id  # a crash report of the block would show them, as this frame's local variables
    held = acquire_or_wait(declared, scope, wrapped)
    if isinstance(held, Outcome):
        yield Run(None, result_of(held))
        return
    with running(Claim(held)) as attempt:
        run = Run(attempt.claim)
        yield run
        attempt.outcome = outcome_of_result(run.result, declared)


def result_of(outcome: Outcome) -> Any:
    """What a block of code left as its result.

    :raises OutcomeUnreadableError: the record holds something else.
    """
    try:
        return json.loads(outcome.body or "null")
    except ValueError as error:
        raise OutcomeUnreadableError from error
