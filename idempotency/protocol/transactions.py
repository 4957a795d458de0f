"""The package's own transactions: short ones, each committed before anything else goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from django.db import DatabaseError, InterfaceError, connections, router, transaction

from .. import sql
from ..exceptions import OuterTransactionError, UnavailableError
from ..models import IdempotencyRecord

logger = logging.getLogger("idempotency")

#: Errors that were logged as permanent. A half-finished deploy makes one or two kinds of them, each for every request.
_reported: set[str] = set()
MAX_REPORTED = 100


def alias() -> str:
    """The database that records are written to and read from. A replica may lag behind, so it is never asked."""
    return router.db_for_write(IdempotencyRecord)


@contextmanager
def own_transaction(using: str, what: str, *, one_statement: bool = False) -> Iterator[None]:
    """Run the block in a transaction that is committed when the block ends.

    If the process dies before the COMMIT, nothing of the block has happened. If it dies after it, all of it has.

    :param what: the subject of an error message, such as "Operation 'charges.create'".
    :param one_statement: the block sends one statement and no more, which the database may commit by itself.
    :raises OuterTransactionError: this could not be committed by itself, because a transaction is open or autocommit is
        off.
    """
    connection = connections[using]
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise OuterTransactionError(
            f"{what} was called with autocommit off on database {using!r}, where its claim could not be committed for "
            f"others to see. Remove AUTOCOMMIT from the database's settings, and leave no set_autocommit(False) behind."
        )
    alone = sql.store(using).one_statement() if one_statement else nullcontext()
    opened = False
    try:
        # Allowed inside the transaction that TestCase wraps a test in, and in no other.
        with transaction.atomic(using=using, durable=True), alone:
            opened = True
            yield
    except RuntimeError as error:
        if opened:
            raise
        raise OuterTransactionError(
            f"{what} was called inside an open transaction of database {using!r}, in which its claim could not be "
            f"committed for others to see. Call it outside of atomic(). Under ATOMIC_REQUESTS a protected view is "
            f"exempt by itself; if another decorator or an overridden as_view() hides it, mark the outermost view "
            f"with django.db.transaction.non_atomic_requests."
        ) from error


@contextmanager
def store_errors(using: str) -> Iterator[None]:
    """Turn what the database raises in the block into an ``UnavailableError``."""
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        raise unavailable(using, error) from error


def unavailable(using: str, error: Exception) -> UnavailableError:
    """What a caller is told of an error of the record's database.

    An error that every retry meets again, such as a missing column after half a deploy, is logged once, and invites to
    no retry.
    """
    if not sql.store(using).is_permanent(error):
        return UnavailableError(retry_after=1)
    kind = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if kind not in _reported and len(_reported) < MAX_REPORTED:
        _reported.add(kind)
        logger.critical(
            "Every protected operation fails: the tables of idempotency in database %r don't fit this release (%s). "
            "Run manage.py migrate, or finish the deploy.",
            using,
            kind,
            exc_info=error,
        )
    return UnavailableError("The request could not be recorded, and a retry can't be until the service is repaired.")
