"""Views that open the transactions of ATOMIC_REQUESTS themselves.

A claim must commit before the handler runs, and the outcome must be recorded after all of the handler's writes are
committed. Neither is possible in a transaction around the whole view, so a view with a protected handler is exempt from
ATOMIC_REQUESTS on every database. For unprotected requests the same transactions are opened here. A protected
request runs in the operation's transaction, and is refused if it would lose one on another database.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.db import connections, transaction
from django.db.transaction import Atomic
from django.http import HttpRequest

from .. import foreign
from ..exceptions import OuterTransactionError
from ..identity import keys
from ..operation import Operation
from ..store import is_transaction_open
from .adapter import handlers_of
from .protection import Protection
from .stack import decorator_stack

#: The attribute of Django's request for the transactions around its view, while they are open.
_OPENED = "_idempotency_atomic_request"


class EveryDatabase(set[str]):
    """The names of all databases, as the set of databases on which Django exempts a view.

    :param view: the view that opens the transactions itself. Decorators above it have a copy of the attribute.
    :param exempted: the databases that the project exempted. Django's ``non_atomic_requests`` calls ``add()``.
    """

    def __init__(self, view: object, exempted: Iterable[str] = ()) -> None:
        super().__init__(connections)
        self.view = view
        self.exempted: Final = set(exempted)

    def add(self, using: str) -> None:
        self.exempted.add(using)


def opens_its_transactions(callback: object) -> bool:
    """Whether ``callback`` calls a view that is exempt because it opens the transactions itself."""
    exemption = getattr(callback, foreign.NON_ATOMIC_REQUESTS, None)
    return isinstance(exemption, EveryDatabase) and any(layer is exemption.view for layer in decorator_stack(callback))


def is_within_atomic_requests(callback: object) -> bool:
    """Whether Django opens a transaction around ``callback`` on any database."""
    return not set(databases_with_atomic_requests()) <= getattr(callback, foreign.NON_ATOMIC_REQUESTS, set())


def opened_here(callback: object) -> list[str]:
    """The databases on which this package opens the transaction of ATOMIC_REQUESTS instead of Django."""
    databases = databases_with_atomic_requests()
    exemption = getattr(callback, foreign.NON_ATOMIC_REQUESTS, None) if databases else None
    return (
        [using for using in databases if using not in exemption.exempted]
        if isinstance(exemption, EveryDatabase)
        else []
    )


def beside_records(operation: Operation, using: str) -> str:
    """Why requests under ``operation`` are refused if ``opened_here()`` names a database without its records."""
    return (
        f"ATOMIC_REQUESTS of database {using!r} can't apply to {operation}, whose records are elsewhere: a crash "
        f"between the two commits would leave an effect without its outcome. Mark the view with "
        f"django.db.transaction.non_atomic_requests(using={using!r}), and open atomic(using={using!r}) around the "
        f"handler's writes to it."
    )


def exempted_by_project(view: object) -> set[str]:
    """The databases on which the project has exempted ``view`` from ATOMIC_REQUESTS."""
    exempted: set[str] = getattr(view, foreign.NON_ATOMIC_REQUESTS, set())
    return exempted.exempted if isinstance(exempted, EveryDatabase) else set(exempted)


def databases_with_atomic_requests() -> list[str]:
    return [using for using, options in connections.settings.items() if options["ATOMIC_REQUESTS"]]


def exempt(view: Callable[..., Any]) -> Callable[..., Any]:
    """Exempt the view of a class with protected handlers from ATOMIC_REQUESTS."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not databases_with_atomic_requests() or _is_protected(view, request):
            return view(request, *args, **kwargs)
        return UnprotectedCall(functools.partial(view, request, *args, **kwargs), request, wrapper).pass_through()

    if iscoroutinefunction(view):
        markcoroutinefunction(wrapper)
    foreign.exempt_on(wrapper, EveryDatabase(wrapper, exempted_by_project(view)))
    return wrapper


def _is_protected(view: Any, request: HttpRequest) -> bool:
    """Whether the whole request runs within its operation. A decorator or an override may skip the operation."""
    method = request.method or ""
    routed = next((routed for routed in handlers_of(view) if method in routed.methods), None)
    if routed is None or not (isinstance(routed.handler, Protection) or iscoroutinefunction(view)):
        return False
    operation = routed.operation_for(method)
    if operation is None:
        return False
    # Check only the headers, because the operation's ``key`` may read the body.
    return operation.policy.key_required or operation.policy.key is not None or keys.META_NAME in request.META


@dataclass(eq=False, repr=False)
class UnprotectedCall:
    """The unprotected handler of one request."""

    #: Runs the view or the method, to its end if it is async.
    call: Callable[[], Any]
    request: HttpRequest
    #: The view that ``call`` runs.
    view: object

    def _databases(self) -> list[str]:
        """The databases on which this package opens the transaction of ATOMIC_REQUESTS for an unprotected request.

        Empty if no URL led here, or if the URL's view, which calls this one, is not exempt.
        """
        match = self.request.resolver_match
        return [] if match is None else opened_here(match.func)

    def pass_through(self) -> Any:
        """Run an unprotected request like Django: in a transaction on each of ``databases``.

        :raises RuntimeError: the view is async and needs a transaction, which Django refuses as well.
        """
        if getattr(self.request, _OPENED, None) is not None:  # opened by the class-based view of this handler
            return self.call()
        databases = self._databases()
        if not databases:
            return self.call()
        if iscoroutinefunction(self.view):
            raise RuntimeError(
                "You cannot use ATOMIC_REQUESTS with async views. Only a protected request to this view runs in a "
                "transaction. Mark the view with django.db.transaction.non_atomic_requests."
            )
        blocks = {using: transaction.atomic(using=using) for using in databases}
        with ExitStack() as transactions:
            for block in blocks.values():
                transactions.enter_context(block)
            setattr(self.request, _OPENED, (transactions, blocks))
            try:
                return self.call()
            finally:
                setattr(self.request, _OPENED, None)

    def refuse_transactions(self, operation: Operation, records: str) -> None:
        """Refuse to claim if a transaction would commit after the outcome is recorded.

        First commit the transactions opened around the view for code above its protected handler, such as an override
        that calls ``super().post()``.

        :param records: the database of the operation's records.
        :raises OuterTransactionError: a transaction is open on any database, or ATOMIC_REQUESTS asks for one on a
            database without the records.
        """
        transactions, blocks = getattr(self.request, _OPENED, None) or (None, {})
        if transactions is not None and all(map(is_innermost, blocks.values())):
            setattr(self.request, _OPENED, None)
            transactions.close()
        for connection in connections.all(initialized_only=True):
            if foreign.in_atomic_block(connection) and is_transaction_open(connection.alias):
                raise OuterTransactionError(
                    f"{operation} was called inside an open transaction of database {connection.alias!r}, which would "
                    f"commit after the operation's outcome is recorded. Call it outside of atomic(). A protected view "
                    f"is exempt from ATOMIC_REQUESTS. If a decorator or an overridden as_view() hides that, put "
                    f"@idempotent directly on the function or method, or mark the outermost view with "
                    f"django.db.transaction.non_atomic_requests(using={connection.alias!r})."
                )
        for using in self._databases():
            if using != records:
                raise OuterTransactionError(beside_records(operation, using))


def is_innermost(block: Atomic) -> bool:
    return foreign.atomic_blocks(connections[foreign.database_of(block)])[-1:] == [block]
