"""ATOMIC_REQUESTS: the transactions that Django would open around a view, and where this package opens them instead.

The claim of a protected request must commit before the handler runs, and the outcome must be recorded after everything
that the handler wrote is committed. Neither is possible within a transaction around the whole view. So a view with a
protected handler is exempt from ATOMIC_REQUESTS on every database, and the same transactions are opened here: around
the view if a request is not protected, and within the claim if it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.http import HttpRequest
from django.utils.functional import cached_property

from ..exceptions import OuterTransactionError, TransactionBrokenError
from ..operation import Operation

#: Set on Django's request while the transactions around its view are open.
_OPENED = "_idempotency_atomic_request"


class EveryDatabase(set[str]):
    """The names of all databases. Django reads from this set on which databases a view is exempt.

    ``exempted`` has the databases on which the project itself has exempted the view. Django's ``non_atomic_requests``
    calls ``add()``.
    """

    def __init__(self, exempted: Iterable[str] = ()) -> None:
        super().__init__(connections)
        self.exempted = set(exempted)

    def add(self, using: str) -> None:
        self.exempted.add(using)


def exempted_by_project(view: object) -> set[str]:
    """The databases on which the project has exempted ``view`` from ATOMIC_REQUESTS."""
    exempted: set[str] = getattr(view, "_non_atomic_requests", set())
    return exempted.exempted if isinstance(exempted, EveryDatabase) else set(exempted)


def databases_with_atomic_requests() -> list[str]:
    return [using for using, options in connections.settings.items() if options["ATOMIC_REQUESTS"]]


class Handler:
    """The unprotected handler of one request, and the transactions that Django would open around it.

    :param call: runs the view or the method, to its end if it is async.
    :param request: Django's own request.
    :param view: the view that ``call`` runs.
    """

    def __init__(self, call: Callable[[], Any], request: HttpRequest, view: object) -> None:
        self._call = call
        self.request = request
        self.view = view

    def __call__(self) -> Any:
        return self._call()

    @cached_property
    def databases(self) -> list[str]:
        """The databases on which Django would open a transaction for this request, according to the view of the URL."""
        atomic = databases_with_atomic_requests()
        if not atomic:
            return atomic
        match = self.request.resolver_match
        exempted = exempted_by_project(self.view if match is None else match.func)
        return [using for using in atomic if using not in exempted]

    def pass_through(self) -> Any:
        """Answer an unprotected request as Django would: in a transaction on each of ``databases``.

        :raises RuntimeError: the view is async, and there is such a database. Django refuses that, too.
        """
        if getattr(self.request, _OPENED, False):  # opened by the class-based view of this handler
            return self()
        databases = self.databases
        if not databases:
            return self()
        if iscoroutinefunction(self.view):
            raise RuntimeError(
                "You cannot use ATOMIC_REQUESTS with async views. Only a protected request to this view has a "
                "transaction of its own. Mark the view with django.db.transaction.non_atomic_requests."
            )
        setattr(self.request, _OPENED, True)
        try:
            with ExitStack() as transactions:
                for using in databases:
                    transactions.enter_context(transaction.atomic(using=using))
                return self()
        finally:
            setattr(self.request, _OPENED, False)

    def refuse_open_transactions(self, operation: Operation) -> None:
        """Refuse to claim within a transaction that would commit after the outcome is recorded.

        This also connects to the other databases on which the handler needs a transaction, so that nothing is claimed
        if one of them can't be reached.

        :raises OuterTransactionError: a transaction is open on some database.
        """
        for using in self.databases:
            connections[using].ensure_connection()
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                _refuse_outer_transaction(connection.alias, operation)

    @contextmanager
    def transactions_besides(self, using: str, operation: Operation) -> Iterator[OtherTransactions]:
        """Open the request's transactions on the databases other than the record's, ``using``.

        They commit at the end of the block, before the outcome is recorded. An exception of the block rolls them back,
        as in Django.

        :raises TransactionBrokenError: the handler returned a success although an error had rolled back one of them.
        """
        databases = [name for name in self.databases if name != using]
        others = OtherTransactions(databases, operation)
        with ExitStack() as transactions:
            for name in databases:
                transactions.enter_context(transaction.atomic(using=name))
            yield others
            others.finish()


class OtherTransactions:
    """The open transactions of one protected request on databases other than the record's."""

    def __init__(self, databases: list[str], operation: Operation) -> None:
        self.databases = databases
        self.operation = operation
        #: The status of the outcome to record, or None if nothing of this run is kept.
        self.status: int | None = None

    def finish(self) -> None:
        """Decide for each transaction whether it may commit."""
        for using in self.databases:
            if self.status is None:
                transaction.set_rollback(True, using=using)
            elif self.status < 400 and (connections[using].needs_rollback or not connections[using].is_usable()):
                # PostgreSQL rolls back at the COMMIT of a failed transaction, without an error.
                raise TransactionBrokenError(
                    f"Operation {self.operation.name!r} returned {self.status} although its transaction on database "
                    f"{using!r} had been marked for rollback or broken by a database error, so nothing it wrote there "
                    f"could be kept. Let the error propagate, or run the statement that may fail in an atomic() of its "
                    f"own."
                )


def _refuse_outer_transaction(using: str, operation: Operation) -> None:
    try:
        with transaction.atomic(using=using, durable=True):
            pass  # raises nothing if the only open transaction is the one that TestCase wraps a test in
    except RuntimeError as error:
        raise OuterTransactionError(
            f"Operation {operation.name!r} was called inside an open transaction of database {using!r}, which would "
            f"commit after the operation's outcome is recorded. Call it outside of atomic(). A protected view is "
            f"exempt from ATOMIC_REQUESTS automatically. If method_decorator(), another decorator or an overridden "
            f"as_view() hides that, put @idempotent directly on the function or method, or mark the outermost view "
            f"with django.db.transaction.non_atomic_requests(using={using!r})."
        ) from error
