"""The handler of a request: its transactions, its run under a claim, and which calls are a part of that run.

Under a claim, the transactions that Django would open around the view are opened around the handler, on each database
but the record's: ``atomic_requests.py`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.functional import cached_property

from ..exceptions import (
    IdempotencyError,
    OuterTransactionError,
    TransactionBrokenError,
    UnrecordableResponseError,
)
from ..identity.scope import Scope
from ..operation import Operation
from ..options.values import Attach
from ..outcome import Outcome, outcome_of
from ..protocol.claim import Claim
from ..protocol.faults import fault_point
from ..protocol.ownership import on_behalf_of
from ..store import is_transaction_open, records_database
from .adapter import Adapter
from .atomic_requests import EveryDatabase, databases_with_atomic_requests

#: The attribute of Django's request that holds its ``_ViewTransactions`` while they are open.
_OPENED = "_idempotency_atomic_request"

#: The status of a response while the job runs. If the response has no Retry-After, it gets this many seconds.
RUNNING = 202
LOOK_AGAIN_AFTER = 1


@dataclass(eq=False, repr=False)
class Handler:
    """The unprotected handler of one request, and the transactions that Django would open around it."""

    call: Callable[[], Any]
    """Runs the view or the method, to its end if it is async."""

    request: HttpRequest
    """Django's own request."""

    view: object
    """The view that ``call`` runs."""

    @cached_property
    def databases(self) -> list[str]:
        """The databases on which Django leaves it to this package to open a transaction around the view of the URL.

        There are none if no URL led here, or if the view of the URL calls this one without being exempt itself.
        """
        match = self.request.resolver_match
        exempt = None if match is None else getattr(match.func, "_non_atomic_requests", None)
        if not isinstance(exempt, EveryDatabase):
            return []
        return [using for using in databases_with_atomic_requests() if using not in exempt.exempted]

    def pass_through(self) -> Any:
        """Answer an unprotected request as Django would: in a transaction on each of ``databases``.

        :raises RuntimeError: the view is async, and there is such a database. Django refuses that, too.
        """
        if getattr(self.request, _OPENED, None) is not None:  # opened by the class-based view of this handler
            return self.call()
        databases = self.databases
        if not databases:
            return self.call()
        if iscoroutinefunction(self.view):
            raise RuntimeError(
                "You cannot use ATOMIC_REQUESTS with async views. Only a protected request to this view has a "
                "transaction of its own. Mark the view with django.db.transaction.non_atomic_requests."
            )
        blocks = {using: transaction.atomic(using=using) for using in databases}
        with ExitStack() as transactions:
            for block in blocks.values():
                transactions.enter_context(block)
            setattr(self.request, _OPENED, _ViewTransactions(transactions, blocks))
            try:
                return self.call()
            finally:
                setattr(self.request, _OPENED, None)

    def refuse_open_transactions(self, operation: Operation) -> None:
        """Refuse to claim within a transaction that would commit after the outcome is recorded.

        The transactions that were opened around the view for what is above its protected handler, such as an override
        that calls ``super().post()``, are committed first.

        This also connects to the other databases on which the handler needs a transaction, so that nothing is claimed
        if one of them can't be reached.

        :raises OuterTransactionError: a transaction is open on some database.
        """
        opened: _ViewTransactions | None = getattr(self.request, _OPENED, None)
        if opened is not None and opened.are_innermost():
            setattr(self.request, _OPENED, None)
            opened.commit()
        for using in self.databases:
            connections[using].ensure_connection()
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block and is_transaction_open(connection.alias):
                raise _outer_transaction(connection.alias, operation)


@contextmanager
def transactions_on(databases: Iterable[str]) -> Iterator[None]:
    """Open a transaction on each database. They commit at the end of the block. An exception rolls them back."""
    with ExitStack() as transactions:
        for using in databases:
            transactions.enter_context(transaction.atomic(using=using))
        yield


@dataclass
class _ViewTransactions:
    """The open transactions around the view of one request."""

    transactions: ExitStack
    blocks: dict[str, Atomic]

    def are_innermost(self) -> bool:
        """Whether no other ``atomic()`` is open within one of them."""
        return all(connections[using].atomic_blocks[-1:] == [block] for using, block in self.blocks.items())

    def commit(self) -> None:
        self.transactions.close()


def finish_transactions(databases: Iterable[str], outcome: Outcome | None, operation: Operation) -> None:
    """Decide for the open transaction of each database whether it may commit.

    :param outcome: the outcome to record, or None if nothing of this run is kept.
    :raises TransactionBrokenError: the handler returned a success although an error had rolled back one of them.
    """
    for using in databases:
        if outcome is None:
            transaction.set_rollback(True, using=using)
        elif outcome.status < 400 and (connections[using].needs_rollback or not connections[using].is_usable()):
            # PostgreSQL rolls back at the COMMIT of a failed transaction, without an error.
            raise TransactionBrokenError(
                f"Operation {operation.name!r} returned {outcome.status} although its transaction on database "
                f"{using!r} had been marked for rollback or broken by a database error, so nothing it wrote there "
                f"could be kept. Let the error propagate, or run the statement that may fail in an atomic() of its "
                f"own."
            )


def _outer_transaction(using: str, operation: Operation) -> OuterTransactionError:
    return OuterTransactionError(
        f"Operation {operation.name!r} was called inside an open transaction of database {using!r}, which would commit "
        f"after the operation's outcome is recorded. Call it outside of atomic(). A protected view is exempt from "
        f"ATOMIC_REQUESTS automatically. If method_decorator(), another decorator or an overridden as_view() hides "
        f"that, put @idempotent directly on the function or method, or mark the outermost view with "
        f"django.db.transaction.non_atomic_requests(using={using!r})."
    )


@dataclass(eq=False, repr=False)
class HandlerRun:
    """One run of a handler under its claim."""

    claim: Claim
    adapter: Adapter
    handler: Handler
    response: Any = None
    """The response for its client, after the run."""

    def outcome(self) -> Outcome | None:
        """Run the handler.

        :returns: the outcome to record, or None if nothing of this run is kept.
        :raises UnrecordableResponseError: the handler's response must be recorded, but can't be.
        """
        owned = self.claim.ownership
        others = [using for using in self.handler.databases if using != owned.using]
        transactions = transactions_on(others) if others else nullcontext()
        with running_handler(self.adapter.http, self.claim), transactions:
            outcome = self._outcome_of(self.handler.call())
            if others:
                # The other transactions commit now. A later failure rolls back only the record's transaction.
                owned.has_effects_elsewhere = outcome is not None
                with on_behalf_of(owned):
                    finish_transactions(others, outcome, owned.operation)
        return outcome

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """Turn an exception of the handler, whose writes have been rolled back, into an outcome.

        :returns: the outcome of the framework's response to it, or None if that response is not recorded.
        :raises Exception: ``error`` itself, if it is a crash.
        """
        self.discard()
        answer = self.adapter.answer_to_exception(error)
        if answer is None:
            raise error
        return self._outcome_of(answer)

    def discard(self) -> None:
        """Free the resources of a response that is not sent, such as an open file."""
        answer, self.response = self.response, None
        if isinstance(answer, HttpResponseBase):
            # Not response.close(), because that also sends the signal request_finished.
            closers = [*answer._resource_closers]  # type: ignore[attr-defined]
        else:
            closers = [answer.close] if hasattr(answer, "close") else []  # such as a coroutine that is never awaited
        for close in closers:
            with suppress(Exception):  # as Django does, because the response is not sent any more
                close()

    def _outcome_of(self, answer: Any) -> Outcome | None:
        owned = self.claim.ownership
        operation = owned.operation
        try:
            fault_point["render.before"]()
            self.response = answer  # so that discard() frees it even if rendering fails
            self.response = self.adapter.render(answer)
            fault_point["render.after"]()
            if not isinstance(self.response, HttpResponseBase):
                raise UnrecordableResponseError(
                    f"The handler of operation {operation.name!r} must return an HttpResponse, not "
                    f"{type(self.response).__name__}. If a framework makes the response from what the handler returns, "
                    f"put @idempotent where the response exists, or register an adapter for the framework."
                )
            if has_job(operation, self.response):
                attach_job(operation, owned.scope, self.response)
                self.claim.reference = self.claim.reference or self.response["Location"]
            if not operation.recordable(self.response.status_code):
                owned.declined = self.response.status_code < 500
                return None
            return outcome_of(self.adapter.form_to_record(self.response), operation, self.claim.reference)
        except IdempotencyError as error:
            error.raised_by = owned  # as ``on_behalf_of`` does
            raise


def has_job(operation: Operation, response: Any) -> bool:
    """Whether ``response`` says that the operation's job is still running."""
    return isinstance(operation.in_progress, Attach) and response.status_code == RUNNING


def attach_job(operation: Operation, scope: Scope, response: Any) -> None:
    """Tell the client where the job of ``operation`` is, and when to look again."""
    attach = operation.in_progress
    assert isinstance(attach, Attach)  # the caller has checked has_job()
    response.setdefault("Location", attach.location(scope))
    response.setdefault("Retry-After", str(LOOK_AGAIN_AFTER))


@dataclass(eq=False)
class _Run:
    """A handler that runs under a claim."""

    http: HttpRequest
    claim: Claim
    connection: BaseDatabaseWrapper
    #: A copy of the context may outlive the run.
    has_ended: bool = False

    def is_here(self) -> bool:
        """Whether the calling code runs in the run's thread, on the connection that has its transaction, if it has one.

        A context may be copied into another thread. What is written there is not in the transaction.
        """
        return not self.has_ended and connections[self.connection.alias] is self.connection

    def has_transaction_for(self, operation: Operation) -> bool:
        """Whether the run's transaction keeps the promises of ``operation``: it is in the database of its records."""
        if not (self.claim.operation.transaction and operation.transaction):
            return False
        return records_database(operation=operation.name, account_id=self.claim.scope.account_id) == self.claim.using


#: The runs around the calling code, the innermost last. A context variable, because threads and tasks of one request
#: may run handlers at the same time.
_runs: ContextVar[tuple[_Run, ...]] = ContextVar("idempotency_runs", default=())


@contextmanager
def running_handler(http: HttpRequest, claim: Claim) -> Iterator[None]:
    """Note that the block runs a handler of the request under its claim."""
    run = _Run(http, claim, claim.ownership.store.connection)
    token = _runs.set((*_runs.get(), run))
    try:
        yield
    finally:
        run.has_ended = True
        _runs.reset(token)


def is_within_a_run(http: HttpRequest) -> bool:
    """Whether the calling context has a run of this request. ``is_running`` says whether it still counts."""
    return any(run.http is http for run in _runs.get())


def is_running(operation: Operation, http: HttpRequest) -> bool:
    """Whether a call under ``operation`` is a part of an operation that this request is already running here.

    It is, if the request runs this operation, as when the handler calls ``super().create()``. It also is, if both
    operations have ``transaction=True`` in one database, as when DRF's ``partial_update()`` calls ``update()``. A
    second claim could not commit inside the first one's transaction, and that transaction keeps the promises of both.

    A copy of the request is another request, because it may have another key.
    """
    here = [run for run in _runs.get() if run.http is http and run.is_here()]
    if any(run.claim.operation.name == operation.name for run in here):
        return True
    return bool(here) and here[-1].has_transaction_for(operation)
