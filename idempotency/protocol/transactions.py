"""The package's own transactions. They are short, and each is committed before anything else happens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import DatabaseError, InterfaceError, connections, router, transaction

from .. import sql
from ..exceptions import OuterTransactionError, UnavailableError
from ..identity.scope import Scope
from ..models import IdempotencyRecord

logger = logging.getLogger("idempotency")

#: Permanent errors that were logged already. A half-finished deploy causes one or two kinds of them at every request.
_reported: set[str] = set()
MAX_REPORTED = 100


def alias(**hints: str) -> str:
    """The database that records are written to and read from. A replica may lag behind, so it is never used.

    :param hints: what a router may decide by: ``operation`` and ``account_id``, where they are known.
    """
    return router.db_for_write(IdempotencyRecord, **hints)


def alias_of(scope: Scope) -> str:
    """The database of the record of ``scope``."""
    return alias(operation=scope.operation, account_id=scope.account_id)


@contextmanager
def own_transaction(using: str, what: str, *, one_statement: bool = False) -> Iterator[None]:
    """Run the block in a transaction that is committed when the block ends.

    If the process dies before the COMMIT, nothing of the block has happened. If it dies after the COMMIT, all of it
    has.

    :param what: the subject of an error message, such as "Operation 'charges.create'".
    :param one_statement: whether the block sends one statement only. The database may then commit it by itself.
    :raises OuterTransactionError: the transaction could not be committed by itself, because another one is open or
        autocommit is off.
    """
    connection = connections[using]
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise OuterTransactionError(
            f"{what} was called with autocommit off on database {using!r}, so its claim could not be committed for "
            f"others to see. Remove AUTOCOMMIT from the database's settings, and undo every set_autocommit(False)."
        )
    opened = False
    try:
        # durable=True raises in an open transaction, except in the one that TestCase wraps a test in.
        with transaction.atomic(using=using, durable=True):
            opened = True
            if one_statement:
                sql.store(using).commit_at_once()
            yield
    except RuntimeError as error:
        if opened:
            raise
        raise OuterTransactionError(
            f"{what} was called inside an open transaction of database {using!r}, in which its claim could not be "
            f"committed for others to see. Call it outside of atomic(). A protected view is exempt from "
            f"ATOMIC_REQUESTS automatically; if another decorator or an overridden as_view() hides that, mark the "
            f"outermost view with django.db.transaction.non_atomic_requests."
        ) from error


@contextmanager
def store_errors(using: str) -> Iterator[None]:
    """Turn an error of the database in the block into an ``UnavailableError``."""
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        raise unavailable(using, error) from error


def unavailable(using: str, error: Exception) -> UnavailableError:
    """Make the error that a caller gets for an error of the record's database.

    A permanent error, such as a missing column after half a deploy, is logged once and has no ``Retry-After``, because
    every retry would meet it again.
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
    return UnavailableError("The request could not be recorded. A retry fails, too, until the service is repaired.")
