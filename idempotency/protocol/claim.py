"""``Claim``: what the code of a protected operation sees of the attempt that it runs under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from ..identity.scope import Scope
from ..operation import Operation
from .ownership import Ownership
from .renewal import renew
from .steps import StepLog, run_step

T = TypeVar("T")


class Claim:
    """One attempt's claim, as its handler gets it from ``current_claim()``.

    ``reference`` may be set by the handler of an operation that declares ``rebuild``: it is recorded in place of the
    response's body.
    """

    def __init__(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self.reference: str | None = None
        self._steps = StepLog()
        self._calls: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Claim of {self.operation.name!r}, attempt {self.attempt}>"

    @property
    def operation(self) -> Operation:
        return self.ownership.operation

    @property
    def scope(self) -> Scope:
        return self.ownership.scope

    @property
    def using(self) -> str:
        """The database alias of the record."""
        return self.ownership.using

    @property
    def attempt(self) -> int:
        """The fencing number: 1 at the first claim, and one more at each further one."""
        return self.ownership.attempt

    @property
    def trace(self) -> str:
        """What this operation has in common with those that it leads to, and with the one that led to it."""
        return self.scope.trace

    @property
    def lost(self) -> bool:
        """Whether the lease is known to be lost. Costs nothing, because it asks nobody."""
        return self.ownership.is_lost

    def renew(self) -> None:
        """Prolong the lease: from now, for the operation's ``lease``.

        A sign of life of a handler that takes longer than its lease. Committed at once, on another connection if the
        handler's has a transaction open.

        :raises LeaseLostError: another attempt has taken over. Stop before the next effect.
        :raises UnavailableError: the store can't be reached; whether the lease still holds is not known.
        """
        self.ensure_owned()
        if not renew(self.ownership):
            self.ownership.lost = True
            self.ensure_owned()

    def ensure_owned(self) -> None:
        """Stop here if the lease is known to be lost. Costs nothing, because it asks nobody.

        :raises LeaseLostError: it is.
        """
        self.ownership.ensure()

    def derive_key(self, name: str) -> UUID:
        """A key for the downstream call ``name``: the same on every attempt and every retry. See ``Scope.derive_key``.

        :raises LeaseLostError: the lease is known to be lost, so the call must not be made.
        """
        self.ensure_owned()
        return self.scope.derive_key(name)

    def derive_text(self, name: str, length: int = 32) -> str:
        """The derived key as ``length`` hexadecimal digits, 16 to 64.

        :raises LeaseLostError: the lease is known to be lost, so the call must not be made.
        """
        self.ensure_owned()
        return self.scope.derive_text(name, length)

    def name_call(self, kind: str) -> str:
        """The name of the next call of a kind, to derive its key from: ``kind``, then ``kind#2``, ``kind#3`` …

        For what can't ask its caller for a name. It is the same on another attempt if that makes the same calls in the
        same order. Calls within a step are counted by themselves, because another attempt may skip the step.
        """
        kind = f"{self._steps.running}/{kind}" if self._steps.running else kind
        self._calls[kind] += 1
        count = self._calls[kind]
        return kind if count == 1 else f"{kind}#{count}"

    def step(self, name: str, call: Callable[[], T]) -> T:
        """Run one phase of the operation, and keep its result so that another attempt doesn't run it again.

        For an operation with ``transaction=False``. The result must be JSON, and comes back as JSON gives it. An
        attempt that was cut off inside ``call`` leaves nothing: the next one calls it again, so a call to the outside
        must carry ``derive_key``, which is the same then.

        :param name: tells the step from the operation's others; 1 to 255 printable characters.
        :raises LeaseLostError: another attempt has taken over; ``call`` was not made, or its result is not kept.
        :raises TypeError: the result is not JSON. If ``call`` is annotated as returning something else, it isn't made.
        :raises ValueError: a step of this name has ended in this attempt already, or the name is not usable.
        :raises ImproperlyConfigured: the operation runs in one transaction, which a step could not outlive.
        :raises OuterTransactionError: a transaction is open, so the step's result could not be committed.
        :raises UnavailableError: the store can't be read or written.
        """
        self.ensure_owned()
        return run_step(self.ownership, self._steps, name, call)
