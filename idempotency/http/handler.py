"""Runs a request's handler as an attempt of an operation, and decides whether its response is an outcome."""

from __future__ import annotations

import functools
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.db import connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.translation import get_language

from .. import foreign
from ..exceptions import IdempotencyError, UnrecordableResponseError
from ..identity.scope import Scope
from ..operation import Operation
from ..options.values import Attach
from ..outcome import Outcome, outcome_of
from ..protocol.claim import Claim
from ..protocol.faults import fault_point
from ..protocol.ownership import on_behalf_of
from ..store import records_database
from .adapter import Adapter, advice_on_adapters
from .atomic_requests import UnprotectedCall
from .body_stream import refuse_half_a_body


@dataclass(eq=False, repr=False)
class HandlerRun:
    """A run of the handler under a claim, and its response."""

    claim: Claim
    adapter: Adapter
    handler: UnprotectedCall
    response: Any = None
    #: Whether the handler returned. A copy of the context may outlive it.
    has_ended: bool = False
    #: Whether the handler called ``set_rollback(True)`` on its transaction.
    undoes_itself: bool = False

    def is_here(self) -> bool:
        """Whether the calling code runs on the claim's connection, and so in its transaction. A context may be copied
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
        connection: Any = owned.store.connection
        token = runs.set((*runs.get(), self))
        # An outer operation, whose handler calls this one, may have replaced the method already.
        of_outer = vars(connection).get("set_rollback")
        # ``needs_rollback`` is not enough: Django also sets it after an error that the handler may catch. Nor is
        # ``rollback_exc``, because a block with savepoint=False, as in save(), sets none.
        depth = len(foreign.atomic_blocks(connection))
        foreign.set_rollback_method(connection, functools.partial(self._set_rollback, connection, depth))
        try:
            return self._outcome_of(self.handler.call())
        finally:
            vars(connection).pop("set_rollback", None)
            if of_outer is not None:
                foreign.set_rollback_method(connection, of_outer)
            self.has_ended = True
            runs.reset(token)

    def _set_rollback(self, connection: Any, depth: int, rollback: bool) -> None:
        """Record that the handler itself calls ``set_rollback()``."""
        type(connection).set_rollback(connection, rollback)
        # Not within a nested atomic().
        if len(foreign.atomic_blocks(connection)) == depth + self.claim.ownership.has_begun:
            self.undoes_itself = rollback

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """Called after the handler's writes are rolled back.

        :returns: the outcome of the framework's response to ``error``, or None if that response is not recorded.
        :raises Exception: ``error`` itself, if it is a crash.
        """
        self.discard()
        with on_behalf_of(self.claim.ownership):
            refuse_half_a_body(self.adapter.http)  # which may be the cause of ``error``
        answer = self.adapter.answer_to_exception(error)
        if answer is None:
            raise error
        return self._outcome_of(answer)

    def discard(self) -> None:
        """Free the resources of an unsent response, such as an open file."""
        answer, self.response = self.response, None
        if isinstance(answer, HttpResponseBase):
            closers = [*foreign.resource_closers(answer)]
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
            refuse_half_a_body(self.adapter.http)  # not before the rendering, which may read the body
            # May come from another server's response, passed on here.
            self.response.headers.pop(self.adapter.profile.replayed, None)
            job = policy.in_progress
            if isinstance(job, Attach) and attach_job(job, owned.fence.scope, self.response):
                self.claim.reference = self.claim.reference or self.response["Location"]
            status = self.response.status_code
            is_outcome = status != HTTPStatus.METHOD_NOT_ALLOWED and policy.recordable(status)
            if not is_outcome or owned.discarded or (self.undoes_itself and status < 400):
                owned.declined = status < 500
                return None
            recorded = self.adapter.form_to_record(self.response)
            if hasattr(self.adapter.http, "LANGUAGE_CODE") and (language := get_language()):
                # As LocaleMiddleware adds it later. On a replay it would add the language of the retry.
                recorded.headers.setdefault("Content-Language", language)
            return outcome_of(recorded, policy, self.claim.reference)
        except IdempotencyError as error:
            error.raised_by = owned  # as ``on_behalf_of`` does
            raise


def attach_job(job: Attach, scope: Scope, response: Any) -> bool:
    """Add the job's address and Retry-After to the 202 of a running job. Return whether the response is one."""
    if response.status_code != HTTPStatus.ACCEPTED:
        return False
    response.setdefault("Location", job.location(scope))
    response.setdefault("Retry-After", "1")
    return True


#: The runs around the calling code, innermost last. A context variable, because threads and tasks of one request
#: may run handlers at the same time.
runs: ContextVar[tuple[HandlerRun, ...]] = ContextVar("idempotency_runs", default=())


def is_running(operation: Operation, http: HttpRequest) -> bool:
    """Whether a call under ``operation`` is part of an operation that this request already runs on this connection.

    It is if the operation is the same, as when the handler calls ``super().create()``, or if both have
    run in a transaction of one database, as when DRF's ``partial_update()`` calls ``update()``: a second claim could
    not commit inside the first one's transaction, and that transaction keeps the promises of both. A copy of the
    request is another request, because it may have another key.
    """
    here = [run.claim for run in runs.get() if run.adapter.http is http and run.is_here()]
    if any(claim.operation.name == operation.name for claim in here):
        return True
    if not here or not (here[-1].ownership.in_transaction and operation.declared["transaction"]):
        return False
    return records_database(operation=operation.name, account_id=here[-1].scope.account_id) == here[-1].using
