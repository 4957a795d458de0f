"""``@idempotent_task``: a Celery task that takes effect once for each message, however often that is delivered."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery import current_task
from celery.local import Proxy
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError

from ... import signals
from ...exceptions import (
    AccountRequiredError,
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    OutcomeUnknownError,
    OuterTransactionError,
    RequestError,
    UnavailableError,
)
from ...identity.fingerprint import Payload
from ...identity.scope import scope_of
from ...operation import Operation, operation_for
from ...options.table import OperationPolicy
from ...outcome import Outcome, outcome_of_result
from ...protocol import claims
from ...protocol.block import result_of
from ...protocol.claim import Claim
from ...protocol.execution import acquire_or_wait, running
from ...protocol.ownership import Ownership
from .deliveries import Delivery
from .policy import ATTRIBUTE, TaskPolicy, policy_of

if TYPE_CHECKING:  # Python 3.10 has no Unpack, and only a type checker reads it
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("idempotency")

#: Enough for workers that are replaced a few times in a row while a message is under way. A message whose worker has
#: died five times is probably why.
DEFAULT_MAX_ATTEMPTS = 5


def idempotent_task(
    operation: str | Operation,
    *,
    consumer: str | None = None,
    dead_letter: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    **policy: Unpack[OperationPolicy],
) -> Callable[[F], F]:
    """Make a Celery task take effect once for each message. Goes under Celery's own decorator::

        @shared_task(bind=True, acks_late=True, reject_on_worker_lost=True)
        @idempotent_task("receipts.send", dead_letter="receipts.dead")
        def send_receipt(self, charge_id): ...

    A message is claimed under its ``idempotency_key`` header, or else the task's id, and under the account that
    published it. The function runs in one transaction with the record, its result (JSON) is recorded, and every
    further delivery returns that without running. A direct call is a plain function call.

    :param consumer: a name to claim messages under, in place of the producer's account.
    :param dead_letter: the name of a queue. What is refused, is cut off too often, or has failed for good, goes there.
    :param max_attempts: how many runs of one message may be cut off, as when its worker is killed, before it is taken
        for a poison message and goes there, too. Runs that end, in a retry or a failure, are not counted here: Celery
        counts those.
    :param policy: the keyword arguments of ``Operation``, when ``operation`` is a name.
    :raises ImproperlyConfigured: it is applied to anything but a plain function, or an argument is not of its kind.
    """
    declared = operation_for(operation, policy)
    if consumer is not None:
        try:
            scope_of(declared.name, consumer, "key")
        except (AccountRequiredError, TypeError) as error:
            raise ImproperlyConfigured(
                f"Operation {declared.name!r}: consumer must be 1 to 255 printable characters, not {consumer!r}."
            ) from error
    if dead_letter is not None and (not isinstance(dead_letter, str) or not dead_letter):
        raise ImproperlyConfigured(
            f"Operation {declared.name!r}: dead_letter must be the name of a queue, not {dead_letter!r}."
        )
    if not isinstance(max_attempts, int) or isinstance(max_attempts, bool) or max_attempts < 1:
        raise ImproperlyConfigured(
            f"Operation {declared.name!r}: max_attempts must be a positive number, not {max_attempts!r}."
        )

    def decorate(function: F) -> F:
        _refuse_all_but_functions(function, declared)
        kept = TaskPolicy(declared, function, consumer, dead_letter, max_attempts)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            task: Any = current_task._get_current_object() if current_task else None
            if policy_of(task) is not kept or task.request.called_directly:
                return function(*args, **kwargs)
            return _consume(Delivery(kept, task), args, kwargs)

        # Celery checks the arguments of a call when it is published, and looks at this function for what it takes and
        # not at the one that it wraps.
        vars(run).update({"__signature__": inspect.signature(function), ATTRIBUTE: kept})
        return cast(F, run)

    return decorate


def _refuse_all_but_functions(function: Any, operation: Operation) -> None:
    # What Celery's decorators return is a proxy, and to look into it would set the app up before its time.
    if issubclass(type(function), Proxy) or not inspect.isfunction(function):
        raise ImproperlyConfigured(
            f"Operation {operation.name!r}: @idempotent_task goes on the function itself, under Celery's decorator:\n"
            f"    @shared_task(...)\n    @idempotent_task({operation.name!r})\n    def ..."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ImproperlyConfigured(
            f"Operation {operation.name!r}: Celery runs no coroutine functions. Give @idempotent_task a plain one."
        )


def _consume(delivery: Delivery, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the worker calls in place of the function."""
    policy, request = delivery.policy, delivery.request
    payload = Payload(policy.arguments(args, kwargs, bound=bool(args) and args[0] is delivery.task))
    try:
        held = acquire_or_wait(policy.operation, delivery.scope, payload)
    except (InProgressError, UnavailableError) as error:
        delivery.wait(error)
    except (RequestError, KeyReusedError, OutcomeUnknownError) as error:
        # Would meet the same answer for ever. Neither the record nor the task's result is touched.
        delivery.dead_letter(str(error), error)
    except OuterTransactionError:
        if not request.is_eager:
            raise
        # Called within its caller's transaction, it stands or falls with that. There is no message to come twice.
        return policy.function(*args, **kwargs)
    if isinstance(held, Outcome):
        delivery.log(logging.INFO, "has been consumed before, and gets the recorded result")
        return result_of(held)
    if delivery.is_poison(held.attempt):
        try:
            delivery.dead_letter(f"{policy.max_attempts} runs were cut off", attempt=held.attempt)
        finally:
            # Dies before it: the lease runs out, and recovery does the same.
            _give_back(held)
    request.idempotency_attempt = held.attempt  # for the dead letter, should it come to that
    delivery.log(logging.INFO, f"runs as attempt {held.attempt}")
    try:
        with running(Claim(held)) as attempt:
            result = policy.function(*args, **kwargs)
            attempt.outcome = outcome = outcome_of_result(result, policy.operation)
    except (LeaseLostError, UnavailableError) as error:
        if error.raised_by is not held:
            raise  # another claim's, within the function: an exception of the function like any other
        # Another attempt has won, or nobody knows whether this one committed: the message finds out.
        delivery.wait(error, ended=1)
    return result_of(outcome)  # as JSON gives it, which is what every further delivery gets


def _give_back(owned: Ownership) -> None:
    """Release a claim under which nothing has run, whatever its operation declares of those that have."""
    try:
        released = claims.release(owned)
    except (DatabaseError, InterfaceError):
        logger.warning("Operation %r: a claim could not be released", owned.operation.name, exc_info=True)
        return
    if released:
        signals.send(signals.released, owned.operation, owned.scope, owned.attempt)
