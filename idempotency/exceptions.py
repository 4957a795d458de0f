"""Every error this package raises, and how a client is told of each.

    IdempotencyError
    ├── RequestError               the request is refused before anything runs
    │   ├── KeyMissingError            400
    │   ├── KeyInvalidError            400
    │   ├── PayloadInvalidError        400
    │   └── AccountRequiredError       401
    ├── DuplicateError             another attempt holds or held the key
    │   ├── InProgressError            409, Retry-After
    │   ├── KeyReusedError             422
    │   └── OutcomeUnknownError        409
    ├── LeaseLostError             this attempt was taken over; its writes are rolled back
    ├── UnavailableError               503, Retry-After
    └── OperationError             the operation's own code or declaration is at fault
        ├── UnrecordableResponseError  500
        ├── OutcomeUnreadableError     500
        ├── TransactionBrokenError     500
        ├── OuterTransactionError      500
        ├── NoTransactionError         500
        └── MessageReusedError         500

    BrokerUnavailableError         raised by a sender, for the relay; no client ever sees it

``status_code``, ``code`` and ``title`` are the members of the RFC 9457 problem that a client receives;
``detail`` is its detail. Nothing in a detail tells one caller about another's record, or a client about the server's
code: what a developer needs to know of an ``OperationError`` is ``str(error)``, which goes to the log.
"""

from __future__ import annotations

import secrets
from functools import cached_property
from typing import ClassVar


class IdempotencyError(Exception):
    """The base of all errors here.

    ``retry_after`` is the number of whole seconds after which a retry makes sense, or None when a retry would meet
    the same answer.
    """

    status_code: ClassVar[int] = 500
    code: ClassVar[str] = "idempotency_error"
    title: ClassVar[str] = "Idempotency error"
    default_detail: ClassVar[str] = "The request could not be processed idempotently."

    def __init__(self, detail: str | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(self.default_detail if detail is None else detail)
        self.retry_after = retry_after
        #: The attempt that met this error; None if it was no attempt's. Tells an operation's own error from that of
        #: another claim within its handler.
        self.raised_by: object | None = None

    @property
    def detail(self) -> str:
        return str(self.args[0])


class RequestError(IdempotencyError):
    """The request can't be taken as it is. Nothing ran and nothing was recorded."""

    status_code = 400
    code = "idempotency_request_invalid"


class KeyMissingError(RequestError):
    code = "idempotency_key_missing"
    title = "Idempotency-Key is missing"
    default_detail = "This operation needs an Idempotency-Key header: one unique value for each logical operation."


class KeyInvalidError(RequestError):
    code = "idempotency_key_invalid"
    title = "Idempotency-Key is malformed"
    default_detail = (
        "The Idempotency-Key must be sent once, as 1 to 255 visible ASCII characters, bare or in double quotes, "
        "without parameters."
    )


class PayloadInvalidError(RequestError):
    code = "idempotency_payload_invalid"
    title = "Payload has no canonical form"
    default_detail = "The payload can't be compared with a retry of itself."


class AccountRequiredError(RequestError):
    status_code = 401
    code = "idempotency_account_required"
    title = "Authentication is required"
    default_detail = "An Idempotency-Key is scoped to an authenticated account, and this request has none."


class DuplicateError(IdempotencyError):
    """Another attempt of the same logical operation decides what this one gets."""


class InProgressError(DuplicateError):
    status_code = 409
    code = "idempotency_in_progress"
    title = "Request is still in progress"
    default_detail = "A request with this Idempotency-Key is still being processed. Retry with the same key."


class KeyReusedError(DuplicateError):
    status_code = 422
    code = "idempotency_key_reused"
    title = "Idempotency-Key was used with another payload"
    default_detail = (
        "This Idempotency-Key belongs to a request with a different payload. Use a new key for a new operation."
    )


class OutcomeUnknownError(DuplicateError):
    status_code = 409
    code = "idempotency_outcome_unknown"
    title = "Outcome is unknown"
    default_detail = (
        "An earlier request with this Idempotency-Key was cut off and its outcome is not known. "
        "It will not be run again until somebody has found out."
    )


class LeaseLostError(IdempotencyError):
    """This attempt no longer owns its record: it stalled past its lease and another attempt took over.

    Whatever it wrote in the record's database is rolled back. Over HTTP the client is answered from the record of the
    attempt that won, so this error is only seen by callers of the function interface.
    """

    status_code = 409
    code = "idempotency_lease_lost"
    title = "Lease was lost"
    default_detail = "This attempt took longer than its lease and another one took over."


class UnavailableError(IdempotencyError):
    """The record's store can't be reached or written, or did not say whether it committed.

    The operation did not run, or ran and may have committed: only a retry with the same key can tell.
    """

    status_code = 503
    code = "idempotency_unavailable"
    title = "Idempotency store is unavailable"
    default_detail = "The request could not be recorded. Retry with the same Idempotency-Key."


class OperationError(IdempotencyError):
    """The protected operation is at fault, not its client. What it wrote in this attempt is rolled back."""

    status_code = 500

    @cached_property
    def reference(self) -> str:
        """What the client is told and the log is searched for: 12 hexadecimal digits, made anew for each error."""
        return secrets.token_hex(6)

    @property
    def detail(self) -> str:
        return f"The server could not complete this operation. Its log says why, under the reference {self.reference}."


class UnrecordableResponseError(OperationError):
    code = "idempotency_response_unrecordable"
    title = "Response can't be recorded"
    default_detail = "The operation answered with a response that can't be recorded, so nothing was kept of it."


class OutcomeUnreadableError(OperationError):
    """A stored outcome can't be turned back into a response. The operation is never run a second time for that."""

    code = "idempotency_outcome_unreadable"
    title = "Recorded outcome can't be read"
    default_detail = "The operation has completed, but its recorded outcome can't be read back."


class TransactionBrokenError(OperationError):
    code = "idempotency_transaction_broken"
    title = "Transaction was broken by the operation"
    default_detail = "The operation went on after a database error that had already undone its transaction."


class OuterTransactionError(OperationError):
    """A protected operation was called inside an open transaction, in which its claim could not be committed."""

    code = "idempotency_outer_transaction"
    title = "Transaction is already open"
    default_detail = "A protected operation was called inside an open transaction."


class NoTransactionError(OperationError):
    """A message was to be published outside of a transaction, so nothing could tie it to a commit."""

    code = "idempotency_no_transaction"
    title = "Transaction is missing"
    default_detail = "A message was to be published outside of a transaction."


class MessageReusedError(OperationError):
    """An operation published another message under the identity of one that it has published before."""

    code = "idempotency_message_reused"
    title = "Message was published with another content"
    default_detail = "The operation has published another message under the same identity."


class BrokerUnavailableError(Exception):
    """The broker can't be reached, or confirms nothing: what a sender raises when no message is at fault.

    The relay then leaves this sender's messages for a while, and doesn't count the attempt.
    """
