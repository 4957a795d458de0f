"""One HTTP request of one operation: from its key to its response."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from django.core.exceptions import ObjectDoesNotExist
from django.db import DatabaseError, InterfaceError
from django.http import RawPostDataException
from django.http.response import HttpResponseBase

from .. import signals
from ..conf import settings
from ..exceptions import (
    BodyGoneError,
    IdempotencyError,
    InProgressError,
    KeyInvalidError,
    KeyMissingError,
    LeaseLostError,
    OutcomeUnreadableError,
    PayloadInvalidError,
    PayloadUnreadableError,
    UnavailableError,
)
from ..identity import keys
from ..identity.fingerprint import Payload
from ..identity.scope import scope_of
from ..operation import Policy
from ..options.values import ACCEPTED, REEXECUTE, Attach
from ..outcome import Outcome
from ..protocol.acquisition import read_winner
from ..protocol.claim import Claim
from ..protocol.claim_request import ClaimRequest, refusal_to_begin
from ..protocol.execution import running
from ..protocol.ownership import End, Ownership
from ..protocol.waiting import acquire_or_wait
from .adapter import Adapter
from .atomic_requests import UnprotectedCall
from .body_stream import BODY_STREAM, UNWATCHED
from .handler import HandlerRun, attach_job
from .key_headers import Reached, key_status, leave_headers
from .key_sources import KeySource
from .payload import route_of, with_headers
from .problems import PROFILES, accepted_response, report

logger: Final = logging.getLogger("idempotency")

#: The statuses of outcomes that are replayed to a caller for whom the object can't be found.
_SHOW_NOTHING: Final = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND})


@dataclass(eq=False, repr=False)
class Exchange:
    """A request, its operation, and its unprotected handler.

    The key, the account and the payload are never in local variables, because a crash report shows the local variables
    of every frame above the handler. They are in attributes, and in objects whose ``repr`` hides them.
    """

    policy: Policy
    adapter: Adapter
    handler: UnprotectedCall
    key: str = ""
    account: str | None = None
    claim_request: ClaimRequest = field(init=False)
    #: The attempt, if this request runs the operation.
    owned: Ownership | None = None
    #: The recorded outcome.
    outcome: Outcome | None = None
    #: An error of the handler that does not refuse this request.
    crash: BaseException | None = None

    def answer(self) -> Any | None:
        """Run the operation, replay its outcome, or refuse.

        Returns None if the handler must run unprotected, because the request has no key or no account.

        Every ``IdempotencyError`` becomes a response, except an error of another claim that the handler did not handle.
        That one propagates, as from an unprotected view.
        """
        self.adapter.profile = PROFILES[self.policy.profile]
        try:
            with self.adapter.http.META.get(BODY_STREAM, UNWATCHED):  # within it, a truncated body raises an error
                self.key = _key_of(self.policy, self.adapter) or ""
                if not self.key:
                    signals.unprotected.send_robust(sender=self.policy.operation)
                    return None
                response, reached = self._answer()
        except BaseException as error:
            if not isinstance(error, IdempotencyError) or error is self.crash:
                self.adapter.add_headers_to_refusal(
                    leave_headers(self.adapter.http, self.policy, self.key, key_status(self._reached()), self.crash)
                )
                raise
            headers = leave_headers(self.adapter.http, self.policy, self.key, key_status(self._reached(), error.code))
            response = self._refuse(error)
        else:
            headers = leave_headers(self.adapter.http, self.policy, self.key, key_status(reached))
        if response is not None:
            for name, value in headers.items():
                response.headers[name] = value
        return response

    def label(self, response: Any) -> Any:
        """Add the key's status to the response of the unprotected handler. Ninja creates the response later."""
        if self.key and isinstance(response, HttpResponseBase):
            # Without the key's other headers: nothing keeps the outcome.
            for name, value in leave_headers(
                self.adapter.http, self.policy, "", key_status(Reached.NO_PROTECTION)
            ).items():
                response.headers[name] = value
        return response

    def _reached(self) -> Reached:
        """How far the request has come, if it gets no further."""
        if self.outcome is not None:
            return Reached.OUTCOME
        if self.owned is None:
            return Reached.NOTHING
        if self.owned.end is End.COMMITTED:  # even if an on_commit callback failed
            return Reached.COMMIT
        is_undone = self.policy.transaction or self.policy.recovery is REEXECUTE
        return Reached.ATTEMPT if is_undone else Reached.UNKNOWN_EFFECT

    def _answer(self) -> tuple[Any | None, Reached]:
        """The response, or None if the request has no account and the operation doesn't require a key."""
        policy = self.policy
        self.account = policy.account(self.adapter.request)
        if self.account is None and not policy.key_required:
            return None, Reached.NO_PROTECTION
        scope = scope_of(policy.operation.name, self.account, self.key, source=policy.account)
        self.claim_request = ClaimRequest(policy, scope, self._payload(), refusal_to_begin(policy, self.key))
        self.handler.refuse_transactions(policy.operation, self.claim_request.store.using)
        settled = acquire_or_wait(self.claim_request)
        if isinstance(settled, Outcome):
            return self._replay(settled)
        try:
            return self._run(settled), self._reached()
        except LeaseLostError as error:
            if error is self.crash:
                raise
            logger.warning("Attempt %d of %s lost its lease", settled.attempt, self.claim_request.scope)
            return self._replay(read_winner(self.claim_request))

    def _payload(self) -> Payload:
        adapter, http = self.adapter, self.adapter.http
        names = self.policy.payload_headers
        try:
            payload = Payload(
                with_headers(adapter.payload(self.policy), http, names) if names else adapter.payload(self.policy),
                method=str(http.method),
                route=route_of(http.resolver_match, adapter.kwargs, adapter.is_place_named),
                # payload= returns everything that counts. A provider may sign each delivery in the query.
                query=http.META.get("QUERY_STRING", "") if self.policy.payload is None else "",
            )
        except RecursionError as error:
            raise PayloadInvalidError("The payload is nested too deeply.") from error
        except RawPostDataException as error:
            raise _already_read(self.policy) from error
        try:
            payload.request_hash  # noqa: B018 - computed here, where an error becomes a response
        except TypeError as error:
            # Not chained, because the frames of the caught error hold the payload in local variables.
            raise PayloadUnreadableError(str(error)) from None
        return payload

    def _run(self, owned: Ownership) -> Any:
        self.owned = owned
        run = HandlerRun(Claim(owned), self.adapter, self.handler)
        try:
            with running(run.claim, run.outcome_of_error):
                owned.outcome = run.call_handler()
        except BaseException as error:
            run.discard()
            if error is owned.foreign_error:
                self.crash = error
            raise
        return run.response

    def _replay(self, outcome: Outcome) -> tuple[Any, Reached]:
        self.outcome = outcome
        try:
            self.adapter.permit_replay()
        except Exception as error:
            refusal = self.adapter.answer_to_exception(error)
            if refusal is None or refusal.status_code == 500:
                raise self._unavailable("The caller's permission for this outcome can't be checked.", error) from error
            # The operation may have removed its object. Only these outcomes show nothing to a caller who lost access.
            if refusal.status_code != HTTPStatus.NOT_FOUND or outcome.status not in _SHOW_NOTHING:
                return refusal, Reached.OUTCOME
        if outcome.reference is not None and outcome.body is None:
            response, is_outcome = self._rebuilt(outcome, outcome.reference)
            if not is_outcome:
                return response, Reached.OUTCOME
        else:
            response = self.adapter.replay(outcome)
        job = self.policy.in_progress
        if isinstance(job, Attach) and attach_job(job, self.claim_request.scope, response):
            return response, Reached.JOB
        response[self.adapter.profile.replayed] = "true"
        return response, Reached.REPLAY

    def _rebuilt(self, outcome: Outcome, reference: str) -> tuple[Any, bool]:
        """The response from ``rebuild``, and whether it is the outcome rather than a refusal."""
        rebuild = self.policy.rebuild
        if rebuild is None:
            raise OutcomeUnreadableError("The recorded outcome is a reference, and the operation declares no rebuild=.")
        try:
            response = self.adapter.render(rebuild(reference, self.adapter.request))
            succeeds = response.status_code < 400
            # A job that has started may end with any status.
            return response, succeeds or outcome.status >= 400 or isinstance(self.policy.in_progress, Attach)
        except ObjectDoesNotExist as error:
            raise BodyGoneError from error
        except (DatabaseError, InterfaceError) as error:
            raise self._unavailable("The recorded outcome can't be rebuilt.", error) from error
        except Exception as error:
            refusal = self.adapter.answer_to_exception(error)
            if refusal is None:
                raise OutcomeUnreadableError from error
            return refusal, False

    def _unavailable(self, problem: str, error: Exception) -> UnavailableError:
        is_of_database = isinstance(error, (DatabaseError, InterfaceError))
        if is_of_database and not self.claim_request.store.is_permanent(error):
            return UnavailableError(f"{problem} Retry with the same Idempotency-Key.", retry_after=1)
        return UnavailableError(f"{problem} Retries fail as well until the service is repaired.")

    def _refuse(self, error: IdempotencyError) -> Any:
        report(error, self.policy.operation.name, self.key)
        if isinstance(error, InProgressError):
            answer = self.policy.in_progress
            if isinstance(answer, Attach):
                return accepted_response(error, answer.location(self.claim_request.scope))
            if answer is ACCEPTED:
                return accepted_response(error)
        custom = settings().error_response
        return self.adapter.answer_to_error(error) if custom is None else custom(self.adapter.request, error)


def _key_of(policy: Policy, adapter: Adapter) -> str | None:
    """The key of a request, or None if it has none and the operation doesn't require one.

    :raises KeyMissingError: the request has no key, and the operation requires one.
    :raises KeyInvalidError: the key is malformed, or the request has two different keys.
    """
    # policy.key is called first, because a crash report of it shows the local variables of this frame.
    try:
        own = None if policy.key is None else policy.key(adapter.request)
    except RawPostDataException as error:
        raise _already_read(policy) from error
    if own is not None:
        own = keys.validate_key(own)
    if keys.META_NAME in adapter.http.META:
        sent = keys.parse_header(adapter.http.META[keys.META_NAME])
        if own is not None and own != sent:
            raise KeyInvalidError("The request has two different keys, in the header and in the operation's own place.")
        return sent
    if own is not None or not policy.key_required:
        return own
    if policy.key is None:
        raise KeyMissingError
    place = policy.key if isinstance(policy.key, KeySource) else "the place that it declares"
    raise KeyMissingError(
        f"This operation requires a key, one unique value for each logical operation, in {place} or in the header "
        f"Idempotency-Key."
    )


def _already_read(policy: Policy) -> PayloadUnreadableError:
    return PayloadUnreadableError(
        f"{policy.operation} needs the body of its request, and code above @idempotent, such as a middleware, has read "
        f"its stream. Let that code use request.body, which can be read again, or declare a payload= or a key= that "
        f"does not need the body."
    )
