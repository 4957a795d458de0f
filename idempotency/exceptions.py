"""The errors of this package, and the status that a client gets for each.

``status_code``, ``code``, ``title`` and ``detail`` become members of the client's RFC 9457 problem. A detail reveals
neither another caller's record nor the server's code. ``str()`` of an ``OperationError``, for developers, is logged.
"""

from __future__ import annotations

import secrets
from functools import cached_property
from typing import ClassVar

__all__ = [
    "AccountInvalidError",
    "AccountRequiredError",
    "BodyGoneError",
    "BrokerUnavailableError",
    "DuplicateError",
    "IdempotencyError",
    "InProgressError",
    "KeyExpiredError",
    "KeyInvalidError",
    "KeyMissingError",
    "KeyReusedError",
    "LeaseLostError",
    "MessageReusedError",
    "NoTransactionError",
    "OperationError",
    "OutcomeUnknownError",
    "OutcomeUnreadableError",
    "OuterTransactionError",
    "PayloadInvalidError",
    "PayloadUnreadableError",
    "ReceiverBusyError",
    "RequestError",
    "TransactionBrokenError",
    "UnavailableError",
    "UnrecordableResponseError",
]


class IdempotencyError(Exception):
    """The base class of errors that concern one request or operation.

    :param detail: the message; by default ``default_detail``.
    :param retry_after: the seconds to wait before a retry (int); None if a retry would get the same answer.
    """

    status_code: ClassVar[int] = 500
    code: ClassVar[str] = "idempotency_error"
    title: ClassVar[str] = "Idempotency error"
    default_detail: ClassVar[str] = "The request could not be processed idempotently."

    def __init__(self, detail: str | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(self.default_detail if detail is None else detail)
        self.retry_after = retry_after
        #: The attempt that raised this error, or None. A claim inside a handler may raise the same error.
        self.raised_by: object | None = None

    @property
    def detail(self) -> str:
        return str(self.args[0])


class RequestError(IdempotencyError):
    """The request is invalid. Nothing ran and nothing was recorded."""

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


class KeyExpiredError(RequestError):
    code = "idempotency_key_expired"
    title = "Idempotency-Key is too old"
    default_detail = (
        "This Idempotency-Key is too old, and no outcome is recorded for it. Find out whether the "
        "operation took effect before you send it with a new key."
    )


class PayloadInvalidError(RequestError):
    code = "idempotency_payload_invalid"
    title = "Payload is not acceptable"
    default_detail = "The payload can't be fingerprinted, so a retry could not be recognised."


class AccountRequiredError(RequestError):
    status_code = 401
    code = "idempotency_account_required"
    title = "Authentication is required"
    default_detail = "An Idempotency-Key is scoped to an authenticated account, and this request has none."


class DuplicateError(IdempotencyError):
    """The request is a duplicate, and the record of an earlier attempt decides its answer."""

    status_code = 409


class InProgressError(DuplicateError):
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
    code = "idempotency_outcome_unknown"
    title = "Outcome is unknown"
    default_detail = (
        "An earlier request with this Idempotency-Key was cut off, and its outcome is not known. "
        "It does not run again until an operator has found out whether it took effect."
    )


class BodyGoneError(DuplicateError):
    code = "idempotency_body_gone"
    title = "Response is no longer kept"
    default_detail = (
        "The request with this Idempotency-Key has completed, and its response is no longer kept. It does not run "
        "again."
    )


class LeaseLostError(IdempotencyError):
    """This attempt no longer owns its record: its lease ended, and another attempt took over.

    Its writes to the record's database are rolled back. Only callers of ``claim()`` get this error. An HTTP client gets
    the outcome of the attempt that won.
    """

    status_code = 409
    code = "idempotency_lease_lost"
    title = "Lease was lost"
    default_detail = "This attempt took longer than its lease, and another one took over."


class UnavailableError(IdempotencyError):
    """The record's database can't be reached or written, or did not confirm a commit.

    Either the operation did not run, or it ran and may have committed. A retry with the same key finds out.
    """

    status_code = 503
    code = "idempotency_unavailable"
    title = "Idempotency store is unavailable"
    default_detail = "The request could not be recorded. Retry with the same Idempotency-Key."


class OperationError(IdempotencyError):
    """The protected operation is at fault, not its client. With ``transaction=True`` its writes are rolled back."""

    status_code = 500

    @cached_property
    def reference(self) -> str:
        """12 random hexadecimal digits that identify the error in the client's response and in the log."""
        return secrets.token_hex(6)

    @property
    def detail(self) -> str:
        return f"The server could not complete this operation. Its log contains the cause: reference {self.reference}."


class AccountInvalidError(OperationError):
    code = "idempotency_account_invalid"
    title = "Account can't be used"
    default_detail = "The operation's account is not 1 to 255 printable characters."


class PayloadUnreadableError(OperationError):
    code = "idempotency_payload_unreadable"
    title = "Payload can't be read"
    default_detail = "The operation's payload can't be read or compared, so a retry could not be recognised."


class UnrecordableResponseError(OperationError):
    code = "idempotency_response_unrecordable"
    title = "Response can't be recorded"
    default_detail = "The operation returned a response that can't be recorded."


class OutcomeUnreadableError(OperationError):
    code = "idempotency_outcome_unreadable"
    title = "Recorded outcome can't be read"
    default_detail = "The operation has completed, but its recorded outcome can't be read back."


class TransactionBrokenError(OperationError):
    code = "idempotency_transaction_broken"
    title = "Transaction was broken by the operation"
    default_detail = "The operation continued after a database error that had already rolled back its transaction."


class OuterTransactionError(OperationError):
    code = "idempotency_outer_transaction"
    title = "Transaction is already open"
    default_detail = "A protected operation was called inside an open transaction, where no claim can be committed."


class NoTransactionError(OperationError):
    code = "idempotency_no_transaction"
    title = "Transaction is missing"
    default_detail = "A message can't be published outside of a transaction, because it depends on a COMMIT."


class MessageReusedError(OperationError):
    code = "idempotency_message_reused"
    title = "Message was already published with different content"
    default_detail = "The operation has already published another message with the same id."


class BrokerUnavailableError(Exception):
    """A sender raises this if no connection was made or confirmed, regardless of the message.

    The relay then pauses this sender's messages on the message's topic, and does not count the try.

    :param all_topics: True pauses all messages of this sender, because all topics have one broker.
    """

    def __init__(self, *args: object, all_topics: bool = False) -> None:
        super().__init__(*args)
        self.all_topics = all_topics


class ReceiverBusyError(Exception):
    """A sender raises this if the receiver refuses messages for now, as with a 429 or 503.

    The relay counts the try, and pauses this sender's messages on the message's topic until the next one.

    :param retry_after: the seconds for which the receiver asked to wait; an hour at most is waited.
    """

    def __init__(self, *args: object, retry_after: float | str = 0) -> None:
        super().__init__(*args)
        self.retry_after: float = float(retry_after)
