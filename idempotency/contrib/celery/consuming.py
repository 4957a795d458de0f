"""``@idempotent_task``: a Celery task that takes effect once per message, however often it is delivered."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar, Unpack, cast

from celery import current_task
from celery.local import Proxy
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError

from ... import signals
from ...exceptions import (
    BodyGoneError,
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    OutcomeUnknownError,
    OuterTransactionError,
    RequestError,
    UnavailableError,
)
from ...foreign import behind_proxy
from ...identity.fingerprint import Payload
from ...operation import Operation, operation_for
from ...options import validators
from ...options.table import TaskArguments, Use
from ...outcome import Outcome, outcome_of_result
from ...protocol import ownership
from ...protocol.claim import Claim
from ...protocol.claim_block import result_of
from ...protocol.claim_request import ClaimRequest
from ...protocol.execution import running, settle_record
from ...protocol.waiting import acquire_or_wait
from .deliveries import Delivery
from .policy import ATTRIBUTE, TaskPolicy, policy_of

F = TypeVar("F", bound=Callable[..., Any])

#: Workers may be replaced a few times in a row while they process a message. If five died, the message is probably the
#: cause.
DEFAULT_MAX_ATTEMPTS = 5


def idempotent_task(
    operation: str | Operation,
    *,
    consumer: str | None = None,
    dead_letter: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    **policy: Unpack[TaskArguments],
) -> Callable[[F], F]:
    """Make a Celery task take effect once per message. Write it below Celery's decorator::

        @shared_task(bind=True, acks_late=True, reject_on_worker_lost=True)
        @idempotent_task("receipts.send", dead_letter="receipts.dead")
        def send_receipt(self, charge_id): ...

    The key of a message is its ``idempotency_key`` header, or else the task's id. Its account is the account that
    published it. The function runs in one transaction with the record. Its result (JSON) is recorded, and every further
    delivery returns it without running. A direct call is a plain function call.

    :param operation: the name of the operation, or an ``Operation``.
    :param consumer: the account under which messages are claimed, instead of the producer's.
    :param dead_letter: the name of a queue for messages that are refused, cut off too often, or whose task finally
        failed.
    :param max_attempts: how many runs of one message may be cut off, for example by killing the worker, before it
        is dead-lettered as a poison message. Celery counts runs that end in a retry or a failure.
    :param policy: keyword arguments of ``Operation.declare()``, if ``operation`` is a name, except arguments about
        requests or clients' keys.
    :raises ImproperlyConfigured: the decorated object is not a plain function, or an argument is invalid or has no
        effect on a task.
    :raises TypeError: a keyword argument is unknown.
    """
    declared = operation_for(operation, policy, Use.TASK)
    problem = None
    if consumer is not None and validators.name(consumer):
        problem = f"consumer {validators.name(consumer)}, not {consumer!r}."
    if dead_letter is not None and (not isinstance(dead_letter, str) or not dead_letter):
        problem = f"dead_letter must be the name of a queue, not {dead_letter!r}."
    if not isinstance(max_attempts, int) or isinstance(max_attempts, bool) or max_attempts < 1:
        problem = f"max_attempts must be a positive number, not {max_attempts!r}."
    if problem:
        raise ImproperlyConfigured(f"Operation {declared.name!r}: {problem}")

    def decorate(function: F) -> F:
        _refuse_all_but_functions(function, declared)
        task_policy = TaskPolicy(declared, function, consumer, dead_letter, max_attempts)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            task: Any = behind_proxy(current_task) if current_task else None
            if policy_of(task) is not task_policy or task.request.called_directly:
                return function(*args, **kwargs)
            return _consume(Delivery(task_policy, task), args, kwargs)

        # Celery checks a published task's arguments against the signature of this function.
        vars(run).update({"__signature__": inspect.signature(function), ATTRIBUTE: task_policy})
        return cast(F, run)

    return decorate


def _refuse_all_but_functions(function: Any, operation: Operation) -> None:
    # Celery's decorators return a proxy. Evaluating it would set up the Celery app too early.
    if issubclass(type(function), Proxy) or not inspect.isfunction(function):
        raise ImproperlyConfigured(
            f"Operation {operation.name!r}: write @idempotent_task directly above the function, below Celery's "
            f"decorator:\n    @shared_task(...)\n    @idempotent_task({operation.name!r})\n    def ..."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ImproperlyConfigured(
            f"Operation {operation.name!r}: Celery can't run coroutine functions. Use a plain function."
        )


def _consume(delivery: Delivery, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Claim the message and run the function, or end this delivery. Called by the worker instead of the function."""
    policy, request = delivery.policy, delivery.request
    payload = Payload(policy.arguments(args, kwargs, bound=bool(args) and args[0] is delivery.task))
    try:
        owned = acquire_or_wait(ClaimRequest(policy.operation.policy, delivery.scope, payload))
    except (InProgressError, UnavailableError) as error:
        delivery.wait(error)
    except (RequestError, KeyReusedError, OutcomeUnknownError) as error:
        # Every later delivery would also be refused. The record and the task's result stay unchanged.
        delivery.dead_letter(str(error), error)
    except OuterTransactionError:
        if not request.is_eager:
            raise
        # An eager call has no message, and commits or rolls back with the caller's transaction.
        return policy.function(*args, **kwargs)
    if isinstance(owned, Outcome):
        try:
            result = result_of(owned)
        except BodyGoneError as error:
            delivery.end_without_result(error)
        delivery.log(logging.INFO, "has been consumed before, and gets the recorded result")
        return result
    if delivery.is_poison(owned.attempt):
        reason = f"{policy.max_attempts} runs were cut off"
        try:
            delivery.dead_letter(reason, attempt=owned.attempt)
        finally:
            # Nothing ran under the claim, so releasing it is safe for every declared recovery. The record keeps the
            # reason, so that the message doesn't count as lost by Redis. If the process dies before the release, the
            # lease runs out and recovery settles the claim.
            settle_record(owned, ownership.release, reason, signals.released)
    request.idempotency_attempt = owned.attempt  # a dead letter carries this number
    delivery.log(logging.INFO, f"runs as attempt {owned.attempt}")
    try:
        with running(Claim(owned)):
            result = policy.function(*args, **kwargs)
            owned.outcome = outcome = outcome_of_result(result, owned.policy)
    except (LeaseLostError, UnavailableError) as error:
        if error is owned.foreign_error:
            raise  # the error of another claim inside the function is the function's error
        # Another attempt took over, or it is unknown whether this one committed. The next delivery finds out.
        delivery.wait(error, ended=1)
    except (OperationalError, InterfaceError) as error:
        if owned.store.is_permanent(error):
            raise
        # The message is not at fault: the database may be restarting. Its writes are rolled back or, outside a
        # transaction, its claim ended as its operation declares.
        delivery.wait(error, ended=1)
    return result_of(outcome)  # decoded from JSON, so that every delivery returns the same
