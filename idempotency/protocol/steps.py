"""Steps: the results of an operation's phases, so that another attempt goes on where the one before was cut off."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, transaction

from .. import sql
from ..exceptions import LeaseLostError, UnavailableError
from ..models import IdempotencyStep
from ..scope import Scope
from .faults import fault_point

if TYPE_CHECKING:
    from .claims import Claim

T = TypeVar("T")

MAX_NAME_LENGTH = 255

#: What JSON holds, as Python has it.
JSON_TYPES = (dict, list, tuple, str, int, float, bool, type(None))


def run_step(claim: Claim, name: str, call: Callable[[], T]) -> T:
    """See ``Claim.step``."""
    operation = claim.operation
    if operation.transaction:
        raise ImproperlyConfigured(
            f"Operation {operation.name!r} runs in one transaction, so a step could not outlive a crash. Declare it "
            f"with transaction=False and its recovery."
        )
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(f"A step's name is 1 to {MAX_NAME_LENGTH} printable characters, not {name!r}.")
    if (declared := _undeclarable(call)) is not None:
        raise TypeError(
            f"Step {name!r} of operation {operation.name!r} is declared to return {declared.__qualname__}, which is "
            f"not JSON and could not be kept. It was not run. Return its JSON form."
        )
    try:
        known = _begin(claim, name)
    except (DatabaseError, InterfaceError) as error:
        raise UnavailableError(retry_after=1) from error
    if known is not None:
        stored: T = json.loads(known)
        return stored
    fault_point("step.started")
    outer, claim.running_step = claim.running_step, f"{claim.running_step}/{name}" if claim.running_step else name
    try:
        result = call()
    finally:
        claim.running_step = outer
    text = _text_of(result, claim, name)
    try:
        _store(claim, name, text)
    except (DatabaseError, InterfaceError) as error:
        # The step happened and is not known to have: like a crash right here. The caller stops, and the next attempt
        # makes the same call with the same derived key.
        raise UnavailableError(retry_after=1) from error
    fault_point("step.stored")
    replayed: T = json.loads(text)  # what a later attempt would get, so that the first one never sees anything else
    return replayed


def _begin(claim: Claim, name: str) -> str | None:
    """Prove ownership, which gives the step a full lease, and look for its result.

    Dies after it: nothing has happened yet. Slept before it while another attempt took over: the fence matches nothing
    and the step is not run. Slept after it: only the derived key protects the call, for nothing here can stop it.
    """
    with transaction.atomic(using=claim.using):
        _keep(claim)
        step = IdempotencyStep.objects.using(claim.using).filter(
            account_id=claim.scope.account_id, record_id=claim.record_id, name=name
        )
        return step.values_list("result", flat=True).first()


def _store(claim: Claim, name: str, text: str) -> None:
    # The fence's row lock is held until COMMIT, so a step is never stored under a record that was taken over: the
    # attempt that took over would run it, and one of two results would be lost.
    with transaction.atomic(using=claim.using):
        _keep(claim)
        IdempotencyStep.objects.using(claim.using).create(
            account_id=claim.scope.account_id, record_id=claim.record_id, name=name, result=text
        )


def _keep(claim: Claim) -> None:
    if not sql.backend(claim.using).set_lease(claim.using, claim.fence, claim.operation.lease):
        claim.lost = True
        raise LeaseLostError


def _undeclarable(call: Callable[[], Any]) -> type | None:
    """What the callable says it returns, if JSON has nothing like it: then an effect would be had for nothing.

    What it doesn't say, or only its call can show, is looked at when the step has run.
    """
    try:
        declared = get_type_hints(call).get("return", Any)
    except (TypeError, NameError, AttributeError):
        return None  # says nothing, or in names that only a type checker knows
    if get_origin(declared) in {Union, types.UnionType}:
        return next(filter(None, map(_not_json, get_args(declared))), None)
    return _not_json(declared)


def _not_json(declared: Any) -> type | None:
    declared = get_origin(declared) or declared
    if declared is Any or not isinstance(declared, type) or issubclass(declared, JSON_TYPES):
        return None
    try:
        return None if any(issubclass(known, declared) for known in JSON_TYPES) else declared
    except TypeError:
        return None  # a protocol that says nothing at run time


def _text_of(result: Any, claim: Claim, name: str) -> str:
    try:
        return json.dumps(result, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"Step {name!r} of operation {claim.operation.name!r} must return JSON, so that it can be kept: {error}"
        ) from error


def forget(using: str, scope: Scope, record_id: int) -> None:
    """Delete the steps of a record that starts over."""
    IdempotencyStep.objects.using(using).filter(account_id=scope.account_id, record_id=record_id).delete()
