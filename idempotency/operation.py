"""``Operation``: the declared policy of one protected operation, and the registry of them.

Imports no models, so an app can declare its operations in an ``operations.py`` that every process discovers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from .conf import SETTING, Defaults, Problem, settings
from .lifecycle import Recovery
from .options.table import OPTIONS, OperationPolicy, resolve
from .options.values import REEXECUTE, Attach, Reconcile

if TYPE_CHECKING:  # Python 3.10 has no Unpack, and only a type checker reads it
    from typing_extensions import Unpack

MAX_NAME_LENGTH = 255


class Operation(Defaults):
    """The policy of one operation.

    Every argument left out follows the setting of the same meaning at the time of the request; the settings and their
    defaults are in the documentation's table.

    :param name: part of every record's identity; 1 to 255 printable characters. Renaming an operation forgets its
        records.
    :param ttl: how long an outcome is kept and a retry recognised.
    :param lease: how long a claim is presumed alive without a sign of life.
    :param heartbeat: renews the lease in the background while the handler runs, up to this long in total, which is at
        most ``ttl``. Without it a handler that takes longer than its lease calls ``current_claim().renew()``, or is
        taken over.
    :param idle_timeout: lets PostgreSQL end the handler's transaction when it has been idle for that long, as a frozen
        process's is, so that its locks don't outlive its lease. Costs a statement; a default for the role costs none.
    :param transaction: True runs the handler and records its outcome in one transaction of the record's database.
    :param recovery: what an abandoned claim means. ``REEXECUTE`` with ``transaction=True``; no default without.
    :param in_progress: ``CONFLICT``, ``ACCEPTED``, ``Wait(seconds)`` or, with ``rebuild``, ``Attach(location)``.
    :param required: False lets a request without a key run unprotected.
    :param methods: the HTTP methods that are protected; others pass through.
    :param command: ``callable(request) -> object``, or a DRF serializer class: what the fingerprint is taken of.
    :param account: ``callable(request) -> str | None``, or its dotted path; None refuses the request.
    :param recordable: ``callable(status: int) -> bool``, or its dotted path: which statuses are outcomes.
    :param headers: names of the response headers kept with the outcome, besides Content-Type.
    :param max_body: the largest response body, in bytes, that is recorded.
    :param rebuild: ``callable(reference: str, request) -> response``: answers a replay from the reference that the
        handler left in ``current_claim().reference`` instead of from a recorded body.
    :raises ImproperlyConfigured: an argument is not of its kind, two contradict each other, ``transaction=False``
        comes without ``recovery``, or the name is declared already with another policy.
    :raises TypeError: there is no such argument.
    """

    name: str
    declared: dict[str, Any]
    """The arguments by name; None for those that follow a setting."""
    heartbeat: timedelta | None
    idle_timeout: timedelta | None
    transaction: bool
    recovery: Recovery
    """What an abandoned claim means, without the particulars of a ``Reconcile``."""
    command: Callable[..., Any] | None
    rebuild: Callable[[str, Any], Any] | None

    def __init__(self, name: str, **policy: Unpack[OperationPolicy]) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise ImproperlyConfigured(
                f"An operation's name is 1 to {MAX_NAME_LENGTH} printable characters, not {name!r}."
            )
        self.name = name
        self.declared = _checked(name, policy)
        for option in OPTIONS.values():
            if option.setting is None:
                setattr(self, option.name, self.declared[option.name])
        self.recovery = _recovery_of(self.declared["recovery"])
        registry.add(self)

    if not TYPE_CHECKING:  # a type checker knows the attributes of Defaults, and that there are no others

        def __getattr__(self, name: str) -> Any:
            """An option that has a setting, when it is read for the first time since the settings changed.

            All of them are read and checked together, so that a wrong policy is refused before anything runs.

            :raises ImproperlyConfigured: the settings are wrong, or contradict what the operation declares.
            """
            option = OPTIONS.get(name)
            if option is None or option.setting is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            for problem in self.problems():
                raise ImproperlyConfigured(str(problem))
            vars(self).update(self._values())
            _in_use.add(self)
            return vars(self)[name]

    def _values(self) -> dict[str, Any]:
        """The options that have a setting: as declared, or else as the settings say."""
        return {
            name: getattr(settings, name) if self.declared[name] is None else resolve(self.declared[name])
            for name, option in OPTIONS.items()
            if option.setting is not None
        }

    def problems(self) -> list[Problem]:
        """What is wrong with the operation, its declaration and the settings taken together.

        :raises ImproperlyConfigured: the settings are wrong by themselves.
        """
        found = [
            Problem(
                option.complaint(f"Operation {self.name!r}: {name}", problem, self.declared[name]),
                option.hint,
                "idempotency.E018",
            )
            for name, option in OPTIONS.items()
            if (problem := option.problem_of_path(self.declared[name]))
        ]
        if not found:
            values = self._values()
            contradiction = _contradiction(self.name, values["ttl"], values["lease"], self.heartbeat)
            found += [contradiction] if contradiction else []
        return found

    @property
    def reconcile(self) -> Reconcile:
        """:raises TypeError: the operation declares another recovery."""
        declared = self.declared["recovery"]
        if not isinstance(declared, Reconcile):
            raise TypeError(f"Operation {self.name!r} declares no reconciler.")
        return declared

    def __repr__(self) -> str:
        return f"<Operation {self.name!r}>"


def _checked(name: str, policy: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation, complete.

    :raises TypeError: there is no such argument.
    :raises ImproperlyConfigured: one is not of its kind, or they contradict each other.
    """
    for argument in policy:
        if argument not in OPTIONS:
            near = get_close_matches(argument, OPTIONS, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(OPTIONS)}."
            raise TypeError(f"Operation {name!r} got an unexpected keyword argument {argument!r}. {advice}")
    declared = {option: policy.get(option) for option in OPTIONS}
    if declared["transaction"] is None:
        declared["transaction"] = OPTIONS["transaction"].default
    for option, value in declared.items():
        if value is not None and (problem := OPTIONS[option].problem_of(value)):
            raise ImproperlyConfigured(f"Operation {name!r}: {option} {problem}, not {value!r}.")
    if not declared["transaction"] and declared["recovery"] is None:
        raise ImproperlyConfigured(
            f"Operation {name!r} has transaction=False, so a crash can leave an effect without an outcome. "
            f"Say what that means with recovery=: REEXECUTE if every effect carries a key derived from the claim, "
            f"Reconcile(fn) if fn can ask what happened, PARK if it must never run again by itself."
        )
    if isinstance(declared["in_progress"], Attach) and declared["rebuild"] is None:
        raise ImproperlyConfigured(
            f"Operation {name!r} attaches duplicates to a job, so it needs rebuild=: callable(reference, request) "
            f"that answers 202 while the job runs, and with its outcome afterwards."
        )
    if contradiction := _contradiction(name, declared["ttl"], declared["lease"], declared["heartbeat"]):
        raise ImproperlyConfigured(str(contradiction))
    return declared


def _recovery_of(declared: Recovery | Reconcile | None) -> Recovery:
    if isinstance(declared, Reconcile):
        return Recovery.RECONCILE
    return REEXECUTE if declared is None else declared


def _contradiction(
    name: str, ttl: timedelta | None, lease: timedelta | None, heartbeat: timedelta | None
) -> Problem | None:
    """What is wrong with durations together. One that is None is not known yet."""
    if ttl is not None and lease is not None and lease >= ttl:
        return Problem(
            f"Operation {name!r} has a lease ({lease}) that is not shorter than its ttl ({ttl}).",
            "Give the operation a shorter lease= or a longer ttl=.",
            "idempotency.E015",
        )
    if ttl is not None and heartbeat is not None and heartbeat > ttl:
        return Problem(
            f"Operation {name!r} has a heartbeat ({heartbeat}) that is longer than its ttl ({ttl}), so a run could "
            f"outlast the retention of its own key.",
            "Give the operation a shorter heartbeat= or a longer ttl=.",
            "idempotency.E017",
        )
    return None


#: The operations that keep values of the settings. Also those that were declared again and are no longer registered.
_in_use: WeakSet[Operation] = WeakSet()


def _forget_values(*, setting: str, **arguments: Any) -> None:
    """Let each operation read the settings anew. Receives Django's ``setting_changed``."""
    if setting == SETTING:
        while _in_use:
            operation = _in_use.pop()
            for name, option in OPTIONS.items():
                if option.setting is not None:
                    vars(operation).pop(name, None)


setting_changed.connect(_forget_values)


class Registry:
    """The declared operations of this process, by name."""

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}
        self._homes: dict[str, str] = {}

    def add(self, operation: Operation) -> None:
        known = self._operations.get(operation.name)
        if known is not None and known.declared != operation.declared:
            raise ImproperlyConfigured(
                f"Operation {operation.name!r} is declared already with another policy. Two operations that share a "
                f"name would share their records: rename one, or declare it once and pass the Operation itself."
            )
        self._operations[operation.name] = operation

    def get(self, name: str) -> Operation | None:
        return self._operations.get(name)

    def discard(self, name: str) -> None:
        """Forget a declaration, as a test does that made one."""
        self._operations.pop(name, None)
        self._homes.pop(name, None)

    def bind(self, name: str, homes: Sequence[str]) -> None:
        """Give the name to the function that is declared under it.

        :param homes: the function's module and qualified name, and those of the methods that it overrides. An override
            belongs to its parent's operation. A module that is loaded again declares the same function again.
        :raises ImproperlyConfigured: the name is another function's.
        """
        known = self._homes.setdefault(name, homes[0])
        if known not in homes:
            raise ImproperlyConfigured(
                f"Operation {name!r} is declared for {homes[0]}, and for {known} already. Two functions that share a "
                f"name would share their records: rename one, or declare one Operation and pass it to both."
            )

    def __iter__(self) -> Iterator[Operation]:
        return iter(list(self._operations.values()))


registry = Registry()


def operation_for(declaration: str | Operation, policy: OperationPolicy) -> Operation:
    """The operation that ``@idempotent`` and the mixin mean by their arguments.

    A bare name is the operation declared under it, or a new one on the defaults.
    """
    if isinstance(declaration, Operation):
        if policy:
            raise ImproperlyConfigured(
                f"Operation {declaration.name!r} carries its own policy; give it no further arguments."
            )
        return declaration
    known = registry.get(declaration) if isinstance(declaration, str) and not policy else None
    return Operation(declaration, **policy) if known is None else known
