"""The handler of a request, and the transactions of ATOMIC_REQUESTS, which this package opens itself.

A claim must commit before the handler runs, and the outcome must be recorded after all that the handler wrote is
committed. Neither is possible in a transaction around the whole view, so a view with a protected handler is exempt from
ATOMIC_REQUESTS on every database. The same transactions are opened here: around the view for an unprotected request,
and within the claim, on each database but the record's, for a protected one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.db import connections, transaction
from django.db.transaction import Atomic
from django.http import HttpRequest
from django.utils.functional import cached_property

from ..exceptions import OuterTransactionError, TransactionBrokenError
from ..identity import keys
from ..operation import Operation
from ..outcome import Outcome
from ..protocol.execution import left_open
from ..store import is_transaction_open
from .adapter import handlers_of
from .protection import Protection, decorator_stack

#: The attribute of Django's request for the transactions around its view, while they are open.
_OPENED = "_idempotency_atomic_request"


class EveryDatabase(set[str]):
    """The names of all databases, as the set of databases on which Django exempts a view.

    :param view: the view that opens the transactions itself. Decorators above it have a copy of the attribute.
    :param exempted: where the project has exempted the view. Django's ``non_atomic_requests`` calls ``add()``.
    """

    def __init__(self, view: object, exempted: Iterable[str] = ()) -> None:
        super().__init__(connections)
        self.view = view
        self.exempted: Final = set(exempted)

    def add(self, using: str) -> None:
        self.exempted.add(using)


def opens_its_transactions(callback: object) -> bool:
    """Whether ``callback`` calls a view that is exempt because it opens the transactions itself."""
    exemption = getattr(callback, "_non_atomic_requests", None)
    return isinstance(exemption, EveryDatabase) and any(layer is exemption.view for layer in decorator_stack(callback))


def has_copied_exemption(callback: object) -> bool:
    """Whether ``callback`` is exempt like a view that opens the transactions itself, but doesn't call that view."""
    is_exempt = isinstance(getattr(callback, "_non_atomic_requests", None), EveryDatabase)
    return is_exempt and not opens_its_transactions(callback)


def is_within_atomic_requests(callback: object) -> bool:
    """Whether Django opens a transaction around ``callback`` on any database."""
    return not set(databases_with_atomic_requests()) <= getattr(callback, "_non_atomic_requests", set())


def exempted_by_project(view: object) -> set[str]:
    """The databases on which the project has exempted ``view`` from ATOMIC_REQUESTS."""
    exempted: set[str] = getattr(view, "_non_atomic_requests", set())
    return exempted.exempted if isinstance(exempted, EveryDatabase) else set(exempted)


def databases_with_atomic_requests() -> list[str]:
    return [using for using, options in connections.settings.items() if options["ATOMIC_REQUESTS"]]


def exempt(view: Callable[..., Any]) -> Callable[..., Any]:
    """Exempt from ATOMIC_REQUESTS the view of a class with protected handlers."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not databases_with_atomic_requests() or _is_protected(view, request):
            return view(request, *args, **kwargs)
        return Handler(functools.partial(view, request, *args, **kwargs), request, wrapper).pass_through()

    if iscoroutinefunction(view):
        markcoroutinefunction(wrapper)
    wrapper._non_atomic_requests = EveryDatabase(wrapper, exempted_by_project(view))  # type: ignore[attr-defined]
    return wrapper


def _is_protected(view: Any, request: HttpRequest) -> bool:
    """Whether nothing of a request runs outside of its operation. A decorator or an override may not call it."""
    method = request.method or ""
    routed = next((routed for routed in handlers_of(view) if method in routed.methods), None)
    if routed is None or not (isinstance(routed.handler, Protection) or iscoroutinefunction(view)):
        return False
    operation = routed.operation_for(method)
    if operation is None:
        return False
    # Only the headers are looked at, because the operation's own ``key`` may read the body.
    return operation.policy.key_required or operation.policy.key is not None or keys.META_NAME in request.META


@dataclass(eq=False, repr=False)
class Handler:
    """The unprotected handler of one request."""

    #: Runs the view or the method, to its end if it is async.
    call: Callable[[], Any]
    request: HttpRequest
    #: The view that ``call`` runs.
    view: object

    @cached_property
    def databases(self) -> list[str]:
        """The databases on which this package opens the transaction of ATOMIC_REQUESTS.

        There are none if no URL led here, or if the URL's view, which calls this one, is not exempt.
        """
        match = self.request.resolver_match
        exemption = None if match is None else getattr(match.func, "_non_atomic_requests", None)
        if not isinstance(exemption, EveryDatabase):
            return []
        return [using for using in databases_with_atomic_requests() if using not in exemption.exempted]

    def pass_through(self) -> Any:
        """Answer an unprotected request as Django would: in a transaction on each of ``databases``.

        :raises RuntimeError: the view is async and needs a transaction, which Django refuses, too.
        """
        if getattr(self.request, _OPENED, None) is not None:  # opened by the class-based view of this handler
            return self.call()
        databases = self.databases
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

    def refuse_open_transactions(self, operation: Operation) -> None:
        """Refuse to claim within a transaction that would commit after the outcome is recorded.

        First commit the transactions opened around the view for code above its protected handler, such as an override
        that calls ``super().post()``.

        :raises OuterTransactionError: a transaction is open on any database.
        """
        transactions, blocks = getattr(self.request, _OPENED, None) or (None, {})
        if transactions is not None and all(map(is_innermost, blocks.values())):
            setattr(self.request, _OPENED, None)
            transactions.close()
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block and is_transaction_open(connection.alias):
                raise OuterTransactionError(
                    f"{operation} was called inside an open transaction of database {connection.alias!r}, which would "
                    f"commit after the operation's outcome is recorded. Call it outside of atomic(). A protected view "
                    f"is exempt from ATOMIC_REQUESTS. If a decorator or an overridden as_view() hides that, put "
                    f"@idempotent directly on the function or method, or mark the outermost view with "
                    f"django.db.transaction.non_atomic_requests(using={connection.alias!r})."
                )


def is_innermost(block: Atomic) -> bool:
    using: Any = block.using
    return connections[using].atomic_blocks[-1:] == [block]


def finish_transactions(blocks: Mapping[str, Atomic], outcome: Outcome | None, operation: Operation) -> None:
    """Decide whether the open transaction of each database may commit.

    :param outcome: the outcome to record, or None to roll back.
    :raises TransactionBrokenError: the handler returned a success although an error had rolled back one of the
        transactions, or it left another one open within.
    """
    for using, block in blocks.items():
        if not is_innermost(block):
            raise left_open(operation, using)
        if outcome is None:
            transaction.set_rollback(True, using=using)
        elif outcome.status < 400 and (connections[using].needs_rollback or not connections[using].is_usable()):
            # PostgreSQL rolls back at the COMMIT of a failed transaction, without an error.
            raise TransactionBrokenError(
                f"{operation} returned {outcome.status} although its transaction on database {using!r} had been marked "
                f"for rollback or broken by a database error, so nothing it wrote there could be kept. Let the error "
                f"propagate, or run the statement that may fail in its own atomic()."
            )
