"""``Claim``: the running attempt, as a protected operation's code uses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from ..identity.scope import Scope
from ..operation import Operation
from .ownership import Ownership
from .renewal import renew
from .steps import StepLog, run_step

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Claim:
    """The claim of one attempt. ``current_claim()`` returns it to the handler.

    The handler of an operation that declares ``rebuild`` may set ``reference``. It is recorded instead of the
    response's body or, with ``body_retention``, in addition to it.
    """

    ownership: Ownership
    reference: str | None = None
    _steps: StepLog = field(default_factory=StepLog, init=False)
    _calls: dict[str, int] = field(default_factory=dict, init=False)
    #: Implements ``begin``. Only ``execution.running`` sets this, while an operation with ``transaction=False`` runs.
    enter_transaction: Callable[[], None] | None = field(default=None, init=False)
    #: While the attempt runs: the locks that ``hold()`` keeps until its end, each with the ``sys.exc_info()`` of its
    #: block.
    locks: list[tuple[ExitStack, Any]] | None = field(default=None, init=False)
    #: The claim of the code that runs this one.
    outer: Claim | None = field(default=None, init=False)

    def __repr__(self) -> str:
        return f"<Claim of {self.scope.operation!r}, attempt {self.attempt}>"

    @property
    def is_running(self) -> bool:
        """Whether the attempt runs. A task or thread that it started may outlive it, with a copy of its context."""
        return self.locks is not None

    @property
    def operation(self) -> Operation:
        return self.ownership.policy.operation

    @property
    def scope(self) -> Scope:
        return self.ownership.scope

    @property
    def using(self) -> str:
        """The database alias of the record."""
        return self.ownership.using

    @property
    def attempt(self) -> int:
        """The fencing number: 1 for the first claim, and one more for each later claim."""
        return self.ownership.attempt

    @property
    def trace(self) -> str:
        """32 hexadecimal digits that all operations of one chain share. See ``Scope.trace``."""
        return self.scope.trace

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost. Sends no query."""
        return self.ownership.is_lost

    def renew(self) -> None:
        """Renew the lease. It then ends after the operation's ``lease``, counted from now.

        Call this in a handler that takes longer than its lease. The renewal is committed at once.

        :raises LeaseLostError: another attempt has taken over. Stop before the next effect.
        :raises UnavailableError: the database can't be reached, and whether the lease is still valid is unknown.
        """
        self.ensure_owned()
        if not renew(self.ownership):
            self.ownership.lost = True
            self.ensure_owned()

    def begin(self) -> None:
        """Begin the operation's transaction: what the handler writes from here on is committed with the outcome, or not
        at all.

        This is for operations with ``transaction=False``, whose handlers first call other services and then write::

            charge = provider.charge(key=claim.derive_key("charge"))
            claim.begin()
            Charge.objects.create(provider_id=charge.id)

        From here on the handler runs as with ``transaction=True``, except that ``recovery`` decides what happens if it
        ends without an outcome: its earlier effects stay. The lease is renewed first, over a new connection if the
        connection was lost during the calls.

        :raises ImproperlyConfigured: the operation declares ``transaction=True``, so its transaction has begun already.
        :raises OuterTransactionError: a transaction is open.
        :raises RuntimeError: the transaction has begun already, or this is not the running handler: it has ended, or
            the caller is another thread, a coroutine, a step, or a block of another claim.
        :raises LeaseLostError: another attempt has taken over. Stop here.
        :raises UnavailableError: the database can't be reached, or the transaction can't be begun.
        """
        if self.ownership.policy.transaction:
            raise ImproperlyConfigured(
                f"{self.operation} runs in its transaction already. Remove begin(). If the handler calls another "
                f"service first, declare the operation with transaction=False and its recovery."
            )
        if self.ownership.has_begun:
            raise RuntimeError(f"{self.operation} has begun its transaction already. Call begin() once.")
        if self.enter_transaction is None or self._steps.running:
            raise RuntimeError(
                f"begin() of {self.operation} was called within a step, or after its handler had ended. Call it in the "
                f"handler, after the last step."
            )
        self.enter_transaction()

    def ensure_owned(self) -> None:
        """Raise an error if the lease is known to be lost. Sends no query.

        :raises LeaseLostError: the lease is known to be lost.
        """
        self.ownership.ensure()

    def discard(self) -> None:
        """Record no outcome of this attempt. The client or caller still gets its response or result.

        With ``transaction=True`` the writes are rolled back, and a retry runs the operation again. With
        ``transaction=False`` nothing is undone, and ``recovery`` decides about a retry. The message of a task that
        calls this is consumed. To have it delivered again, raise an error.
        """
        self.ownership.discarded = True

    def derive_key(self, name: str) -> UUID:
        """Derive the key for one downstream call. It is the same in every attempt and every retry. See
        ``Scope.derive_key``.

        :param name: names the call.
        :raises LeaseLostError: the lease is known to be lost, so the call must not be made.
        :raises ValueError: the name is empty.
        """
        self.ensure_owned()
        key = self.scope.derive_key(name)
        self.operation.note_call(name)
        return key

    def derive_text(self, name: str, length: int = 32) -> str:
        """Derive a key as hexadecimal digits.

        :param name: names the call.
        :param length: the number of digits, 16 to 64.
        :raises LeaseLostError: the lease is known to be lost, so the call must not be made.
        :raises ValueError: the name is empty, or the length is not between 16 and 64.
        """
        self.ensure_owned()
        key = self.scope.derive_text(name, length)
        self.operation.note_call(name)
        return key

    def name_call(self, kind: str) -> str:
        """Name the next call of a kind, to derive its key: ``kind``, then ``kind#2``, ``kind#3`` and so on.

        Use this for calls without a name. Another attempt gets the same names if it makes the same calls in the same
        order. Calls within a step are counted separately, because another attempt may skip the step.
        """
        kind = f"{self._steps.running}/{kind}" if self._steps.running else kind
        count = self._calls[kind] = self._calls.get(kind, 0) + 1
        return kind if count == 1 else f"{kind}#{count}"

    def step(self, name: str, call: Callable[[], T]) -> T:
        """Run one phase of the operation and store its result, so that another attempt doesn't run it again.

        This is for operations with ``transaction=False``. If the process dies inside ``call``, nothing is stored and
        the next attempt calls it again. So a call to another service needs a key from ``derive_key``, which is the same
        in every attempt.

        :param name: distinguishes the step from the operation's other steps; 1 to 255 printable characters.
        :param call: does the work. Its result must be JSON.
        :returns: the result, read back from JSON.
        :raises LeaseLostError: another attempt has taken over. ``call`` did not run, or its result is not stored.
        :raises TypeError: the result is not JSON. If that follows from the return annotation, ``call`` does not run.
        :raises ValueError: a step with this name has already ended in this attempt, or the name is invalid.
        :raises ImproperlyConfigured: the operation runs in one transaction, so a step could not outlive a crash.
        :raises OuterTransactionError: a transaction is open, so the step's result could not be committed.
        :raises OutcomeUnreadableError: the step's stored result is damaged, or encrypted under an unknown key. ``call``
            did not run.
        :raises UnavailableError: the database can't be read or written.
        """
        self.ensure_owned()
        return run_step(self.ownership, self._steps, name, call)
