"""Steps: the stored results of an operation's phases, so that another attempt continues where one was cut off."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from django.core.exceptions import ImproperlyConfigured
from django.db.models import QuerySet

from ..bodies import UNREADABLE, decode_body, encode_body
from ..exceptions import OutcomeUnreadableError, OuterTransactionError
from ..models import IdempotencyStep
from ..options import validators
from ..outcome import json_text
from ..store import Fence, store_for
from .faults import fault_point
from .ownership import Ownership, fenced_change, on_behalf_of, store_errors

T = TypeVar("T")

#: The Python types of JSON values.
JSON_TYPES = (dict, list, tuple, str, int, float, bool, type(None))


@dataclass
class StepLog:
    """The steps of one attempt."""

    #: The path of the running step; empty outside of a step.
    running: str = ""
    #: The names of the steps that have ended. Their results are stored.
    ended: set[str] = field(default_factory=set)


def run_step(owned: Ownership, log: StepLog, name: str, call: Callable[[], T]) -> T:
    """Implements ``Claim.step``."""
    _refuse_wrong_use(owned, log, name, call)
    known = _begin(owned, name)
    if known is not None:
        log.ended.add(name)
        return cast("T", _read(known, owned, name))
    fault_point["step.started"]()
    outer, log.running = log.running, f"{log.running}/{name}" if log.running else name
    try:
        result = call()
    finally:
        log.running = outer
    text = json_text(
        result, f"Step {name!r} of operation {owned.scope.operation!r} must return JSON, so that it can be kept"
    )
    # If the process dies before this is committed, or the database fails, the step has run but its result is not
    # stored. The attempt stops, and the next one makes the same call with the same derived key.
    _keep(owned, name, text)
    log.ended.add(name)
    fault_point["step.stored"]()
    return cast("T", json.loads(text))  # so that the first attempt gets the same value as later ones


def _refuse_wrong_use(owned: Ownership, log: StepLog, name: str, call: Callable[[], Any]) -> None:
    operation = owned.scope.operation
    if owned.has_begun:
        raise OuterTransactionError(
            f"Step {name!r} of operation {operation!r} was called after begin(), so its result could not be committed. "
            f"Run every step before begin()."
        )
    if owned.policy.transaction:
        raise ImproperlyConfigured(
            f"Operation {operation!r} runs in one transaction, so a step could not outlive a crash. Declare it "
            f"with transaction=False and its recovery."
        )
    if problem := validators.name(name):
        raise ValueError(f"A step's name {problem}, not {name!r}.")
    if name in log.ended:
        raise ValueError(
            f"Operation {operation!r} has run a step named {name!r} in this attempt already, so this one would be "
            f"skipped. It was not run. Give each step a unique name, such as '{name}-2'."
        )
    if (declared := _undeclarable(call)) is not None:
        raise TypeError(
            f"Step {name!r} of operation {operation!r} is declared to return {declared.__qualname__}, which is "
            f"not JSON and could not be kept. It was not run. Return its JSON form."
        )


def _begin(owned: Ownership, name: str) -> str | None:
    """Prove ownership, which also renews the lease, and return the step's stored result, or None.

    If the process dies after this, nothing has happened yet. If it slept before this until another attempt took over,
    the fence matches no row and the step does not run. If it sleeps after this, only the derived key protects the call,
    because nothing here can stop it.
    """
    kept = _kept(owned, name)
    return _change_owned(owned, name, lambda: kept.values_list("result", flat=True).first())


def _keep(owned: Ownership, name: str, text: str) -> None:
    kept = _kept(owned, name)
    encoded = encode_body(text.encode("utf-8"), "application/json")
    tries = itertools.count()

    def keep() -> None:
        # The COMMIT of an earlier try may have succeeded although its answer was lost.
        if next(tries) == 0 or not kept.exists():
            IdempotencyStep.objects.using(owned.using).create(
                account_id=owned.scope.account_id, record_id=owned.fence.id, name=name, result=encoded
            )

    # The fence locks the record's row until the COMMIT, so a step is never stored under a record that was taken over.
    # Otherwise both attempts could run the step, and one of the two results would be lost.
    _change_owned(owned, name, keep)


def _kept(owned: Ownership, name: str) -> QuerySet[IdempotencyStep]:
    return IdempotencyStep.objects.using(owned.using).filter(
        account_id=owned.scope.account_id, record_id=owned.fence.id, name=name
    )


def _change_owned(owned: Ownership, name: str, change: Callable[[], T]) -> T:
    """Run ``change`` in a transaction that first proves that the attempt owns the record."""

    def proven() -> T:
        prove_ownership(owned)
        return change()

    with on_behalf_of(owned), store_errors(owned.using):
        return fenced_change(owned, proven, step=name)


def prove_ownership(owned: Ownership) -> None:
    """:raises LeaseLostError: another attempt owns the record."""
    lease, retention = owned.policy.lease, owned.policy.retention
    if not store_for(owned.using).set_lease(owned.fence, lease, retention=retention):
        owned.lost = True
        owned.ensure()


def _undeclarable(call: Callable[[], Any]) -> type | None:
    """The type in the return annotation, if it can't be JSON and so can't be stored. None if it can, or if unknown."""
    try:
        declared = get_type_hints(call).get("return", Any)
    except (TypeError, NameError, AttributeError):
        return None  # no annotation, or one that only a type checker can resolve
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
        return None  # a protocol without runtime checks


def _read(result: str, owned: Ownership, name: str) -> Any:
    try:
        return json.loads(decode_body(result))
    except UNREADABLE as error:
        raise OutcomeUnreadableError(
            f"The result of step {name!r} of operation {owned.scope.operation!r} can't be read: {error} The step has "
            f"run, so it is not run again."
        ) from error


def forget(fence: Fence, using: str) -> None:
    """Delete the steps of a record that starts over."""
    IdempotencyStep.objects.using(using).filter(account_id=fence.scope.account_id, record_id=fence.id).delete()
