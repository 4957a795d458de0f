"""Runs a protected handler, renders its response, and decides whether that is an outcome."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.db import connections, transaction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ..exceptions import IdempotencyError, UnrecordableResponseError
from ..identity.scope import Scope
from ..operation import Operation, Policy
from ..options.values import Attach
from ..outcome import Outcome, outcome_of
from ..protocol.execution import Attempt
from ..protocol.faults import fault_point
from ..protocol.ownership import on_behalf_of
from ..store import records_database
from .adapter import Adapter, advice_on_adapters
from .body_stream import refuse_half
from .handler import Handler, finish_transactions
from .late_changes import refuse_late_changes


@dataclass(eq=False, repr=False)
class HandlerAttempt(Attempt):
    adapter: Adapter
    handler: Handler
    response: Any = None
    #: Whether the handler has returned. A copy of the context may outlive it.
    has_ended: bool = False
    #: Whether the handler has called ``set_rollback(True)`` on one of its transactions.
    undoes_itself: bool = False

    def is_here(self) -> bool:
        """Whether the calling code runs on the attempt's connection, and so in its transaction. A context may be copied
        into another thread.
        """
        connection = self.claim.ownership.store.connection
        return not self.has_ended and connections[connection.alias] is connection

    def call_handler(self) -> Outcome | None:
        """Run the handler.

        :returns: the outcome to record, or None to roll back.
        :raises UnrecordableResponseError: the response must be recorded, but can't be.
        """
        owned = self.claim.ownership
        others = {using: transaction.atomic(using=using) for using in self.handler.databases if using != owned.using}
        token = attempts.set((*attempts.get(), self))
        watched = [owned.store.connection, *(connections[using] for using in others)]
        try:
            with ExitStack() as transactions:
                for block in others.values():
                    transactions.enter_context(block)
                for connection in watched:
                    transactions.enter_context(self._watching_rollbacks(connection))
                outcome = self._outcome_of(self.handler.call())
                if others:
                    # The other transactions commit now. A later failure rolls back only the record's transaction.
                    owned.has_effects_elsewhere = outcome is not None
                    with on_behalf_of(owned):
                        finish_transactions(others, outcome, owned.policy.operation)
                return outcome
        finally:
            self.has_ended = True
            attempts.reset(token)

    @contextmanager
    def _watching_rollbacks(self, connection: Any) -> Iterator[None]:
        """Note the handler's own calls of ``set_rollback()``.

        ``needs_rollback`` is not enough, because Django also sets it after an error, which the handler may have caught.
        """
        depth, of_outer = len(connection.atomic_blocks), vars(connection).get("set_rollback")

        def set_rollback(rollback: bool) -> None:
            type(connection).set_rollback(connection, rollback)
            if len(connection.atomic_blocks) == depth:  # not within a nested atomic()
                self.undoes_itself = rollback

        connection.set_rollback = set_rollback
        try:
            yield
        finally:
            del connection.set_rollback
            if of_outer is not None:  # of an operation whose handler calls this one
                connection.set_rollback = of_outer

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """Called after the handler's writes are rolled back.

        :returns: the outcome of the framework's response to ``error``, or None if that response is not recorded.
        :raises Exception: ``error`` itself, if it is a crash.
        """
        self.discard()
        with on_behalf_of(self.claim.ownership):
            refuse_half(self.adapter.http)  # which may be the cause of the error
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
            with suppress(Exception):  # as Django does
                close()

    def _outcome_of(self, answer: Any) -> Outcome | None:
        owned = self.claim.ownership
        policy = owned.policy
        try:
            fault_point["render.before"]()
            self.response = answer  # so that discard() frees it even if rendering fails
            self.response = self.adapter.render(answer)
            fault_point["render.after"]()
            if not isinstance(self.response, HttpResponseBase):
                raise UnrecordableResponseError(
                    f"The handler of operation {policy.operation.name!r} must return an HttpResponse, not "
                    f"{type(self.response).__name__}. If a framework makes the response later, put @idempotent where "
                    f"the response exists, or register an adapter for the framework.{advice_on_adapters()}"
                )
            refuse_late_changes(self.response, policy.operation)
            refuse_half(self.adapter.http)  # after the rendering, which may read the body
            del self.response[self.adapter.profile.replayed]  # such as another server's, whose response is passed on
            if attach_job(policy, owned.fence.scope, self.response):
                self.claim.reference = self.claim.reference or self.response["Location"]
            status = self.response.status_code
            is_outcome = status != HTTPStatus.METHOD_NOT_ALLOWED and policy.recordable(status)
            if not is_outcome or owned.discarded or (self.undoes_itself and status < 400):
                owned.declined = status < 500
                return None
            return outcome_of(self.adapter.form_to_record(self.response), policy, self.claim.reference)
        except IdempotencyError as error:
            error.raised_by = owned  # as ``on_behalf_of`` does
            raise


def attach_job(policy: Policy, scope: Scope, response: Any) -> bool:
    """Whether the response is the 202 of a running job, which gets the job's address and a Retry-After."""
    attach = policy.in_progress
    if not isinstance(attach, Attach) or response.status_code != HTTPStatus.ACCEPTED:
        return False
    response.setdefault("Location", attach.location(scope))
    response.setdefault("Retry-After", "1")
    return True


#: The attempts around the calling code, innermost last. A context variable, because threads and tasks of one request
#: may run handlers at the same time.
attempts: ContextVar[tuple[HandlerAttempt, ...]] = ContextVar("idempotency_attempts", default=())


def is_running(operation: Operation, http: HttpRequest) -> bool:
    """Whether a call under ``operation`` is part of an operation that this request already runs on this connection.

    It is if the operation is the same, as when the handler calls ``super().create()``, or if both have
    ``transaction=True`` in one database, as when DRF's ``partial_update()`` calls ``update()``: a second claim could
    not commit inside the first one's transaction, and that transaction keeps the promises of both. A copy of the
    request is another request, because it may have another key.
    """
    here = [attempt.claim for attempt in attempts.get() if attempt.adapter.http is http and attempt.is_here()]
    if any(claim.operation.name == operation.name for claim in here):
        return True
    if not here or not (here[-1].ownership.policy.transaction and operation.declared["transaction"]):
        return False
    return records_database(operation=operation.name, account_id=here[-1].scope.account_id) == here[-1].using
