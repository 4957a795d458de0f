"""``Operation``: the declared policy of one protected operation. ``registry``: the operations of this process.

This module imports no models, so that every process can import an app's ``operations.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final, Unpack
from weakref import WeakSet

from django.core.checks import Error
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from .conf import SETTING, contradictions, refuse, settings
from .extensions import extensions
from .lifecycle import Recovery
from .options import validators
from .options.table import OPTIONS, Options, RequestArguments, TaskArguments, Use
from .options.values import ACCEPTED, REEXECUTE, Attach, Reconcile

logger: Final = logging.getLogger("idempotency")

#: The maximum number of names that ``Operation.calls`` keeps.
MAX_CALLS: Final = 20


class Operation:
    """The policy of one operation. ``declare()`` makes it, so that every part of the process finds it by its name.

    An omitted option takes its value from the settings at the time of the request.
    """

    def __init__(self, name: str, **arguments: Unpack[RequestArguments]) -> None:
        if problem := validators.name(name):
            raise ImproperlyConfigured(f"An operation's name {problem}, not {name!r}.")
        self.name = name
        #: The arguments by name; None if omitted.
        self.declared: Final = _checked(name, arguments)
        #: The names of calls for which this process has derived keys, in the order of their first use. The admin lists
        #: them, because only the code knows them.
        self.calls: Final[dict[str, None]] = {}

    @classmethod
    def declare(cls, name: str, **arguments: Unpack[RequestArguments]) -> Operation:
        """Declare an operation, which several functions can share.

        :param name: part of every record's identity; 1 to 255 printable characters. After a rename, earlier records no
            longer apply.
        :param arguments: the options, as listed in the documentation.
        :raises ImproperlyConfigured: an argument has a wrong value, two arguments contradict each other,
            ``transaction=False`` has no ``recovery``, or the name is already declared with another policy.
        :raises TypeError: an argument is unknown.
        """
        operation = cls(name, **arguments)
        registry.add(operation)
        return operation

    @cached_property
    def policy(self) -> Policy:
        """The options in force, until a setting changes.

        :raises ImproperlyConfigured: the settings are wrong, or contradict the declaration.
        """
        refuse(self.mistakes())
        return self._policy()

    def _policy(self) -> Policy:
        values = vars(settings().defaults) | {
            name: OPTIONS[name].value_of(value) for name, value in self.declared.items() if value is not None
        }
        return Policy(operation=self, **values | {"recovery": self.recovery})

    def mistakes(self) -> list[Error]:
        """The mistakes in the declaration and in its combination with the settings, which must be valid."""
        found = []
        for name, value in self.declared.items():
            if problem := OPTIONS[name].problem_of_path(value):
                message = OPTIONS[name].complaint(f"{self}: {name}", problem, value)
                found.append(Error(message, hint=OPTIONS[name].hint, id="idempotency.E018"))
        return found or list(contradictions(str(self), vars(self._policy())))

    def note_call(self, name: str) -> None:
        if len(self.calls) < MAX_CALLS:
            self.calls[name] = None

    @property
    def recovery(self) -> Recovery:
        """How to recover an abandoned claim. ``RECONCILE`` stands for any ``Reconcile``."""
        declared = self.declared["recovery"]
        if isinstance(declared, Reconcile):
            return Recovery.RECONCILE
        return REEXECUTE if declared is None else declared

    @property
    def reconcile(self) -> Reconcile:
        """:raises TypeError: the operation declares another recovery."""
        declared = self.declared["recovery"]
        if not isinstance(declared, Reconcile):
            raise TypeError(f"Operation {self.name!r} declares no reconciler.")
        return declared

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return f"Operation {self.name!r}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Policy(Options):
    """The options in force for one operation, under one version of the settings."""

    operation: Operation

    @cached_property
    def undone_by_crash(self) -> bool:
        """Whether a crash undoes an attempt: its effects are in one transaction with its outcome, and run again."""
        return self.transaction and self.recovery is Recovery.REEXECUTE


def _checked(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of an operation, and add omitted ones as None."""
    for argument in arguments:
        if argument not in OPTIONS:
            near = get_close_matches(argument, OPTIONS, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(OPTIONS)}."
            raise TypeError(f"Operation {name!r} got an unexpected keyword argument {argument!r}. {advice}")
    declared = {option: arguments.get(option) for option in OPTIONS}
    if declared["transaction"] is None:
        declared["transaction"] = OPTIONS["transaction"].default
    for option, value in declared.items():
        if value is not None and (problem := OPTIONS[option].problem_of(value)):
            raise ImproperlyConfigured(OPTIONS[option].complaint(f"Operation {name!r}: {option}", problem, value))
    if not declared["transaction"] and declared["recovery"] is None:
        raise ImproperlyConfigured(
            f"Operation {name!r} has transaction=False, so a crash can leave an effect without an outcome. Declare a "
            f"recovery=: REEXECUTE if every effect carries a key derived from the claim, Reconcile(fn) if fn can find "
            f"out what happened, PARK if it must never run again automatically."
        )
    if isinstance(declared["in_progress"], Attach) and declared["rebuild"] is None:
        raise ImproperlyConfigured(
            f"Operation {name!r} attaches duplicates to a job, so it needs rebuild=: callable(reference, request) that "
            f"returns 202 while the job runs, and its outcome afterwards."
        )
    refuse(contradictions(f"Operation {name!r}", declared))
    return declared


def _read_again(*, setting: str, **arguments: Any) -> None:
    """Receives Django's ``setting_changed``, after ``conf`` does."""
    if setting == SETTING:
        registry.forget_policies()


setting_changed.connect(_read_again)


class Registry:
    """The declared operations of this process, by name."""

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}
        #: Also those that a later declaration under the same name has replaced.
        self._all: WeakSet[Operation] = WeakSet()
        self._homes: dict[str, str] = {}
        self._imported: set[Callable[[], object]] = set()
        self._of_requests: set[str] = set()
        self._with_key: set[str] = set()

    def load(self) -> None:
        """Import modules that this process would not otherwise load, such as a worker's task modules.

        For commands and system checks only: an integration may set up Django again, which a process that serves
        requests must not do. A failed import is logged once.
        """
        for importer in {each.import_operations for each in extensions() if each.import_operations} - self._imported:
            self._imported.add(importer)  # first, because Celery runs the system checks, which call this
            try:
                importer()
            except Exception:  # the project's modules may raise anything
                logger.exception("Some operations are unknown in this process: their modules can't be imported")

    def add(self, operation: Operation) -> None:
        known = self._operations.get(operation.name)
        if known is not None and known.declared != operation.declared:
            raise ImproperlyConfigured(
                f"Operation {operation.name!r} is already declared with another policy. Two operations with one name "
                f"would share their records. Rename one, or declare it once and pass the Operation itself."
            )
        self._operations[operation.name] = operation
        self._all.add(operation)

    def forget_policies(self) -> None:
        """Let each operation combine its declaration with the settings again."""
        for operation in self._all:
            vars(operation).pop("policy", None)

    def get(self, name: str) -> Operation | None:
        return self._operations.get(name)

    def bind(self, name: str, homes: Sequence[str]) -> None:
        """Remember the function for which the name is declared. A reloaded module may declare it again.

        :param homes: the module and qualified name of the function, and of the methods that it overrides, whose
            operation it shares.
        """
        known = self._homes.setdefault(name, homes[0])
        if known not in homes:
            raise ImproperlyConfigured(
                f"Operation {name!r} is declared for {homes[0]}, and already for {known}. Two functions with one "
                f"operation name would share their records. Rename one, or declare one Operation and pass it to both."
            )

    def of_requests(self) -> list[Operation]:
        """The operations that protect a function or method that handles requests."""
        return [operation for name, operation in self._operations.items() if name in self._of_requests]

    def note_handler(self, operation: Operation) -> None:
        """Remember that an operation protects a function or method that handles requests."""
        self._of_requests.add(operation.name)
        if operation.declared["key"] is not None:
            self._with_key.add(operation.name)

    def key_sources(self) -> list[Callable[[Any], str | None] | None]:
        """The places outside of the standard header where operations of requests find their keys."""
        return [self._operations[name].policy.key for name in list(self._with_key)]

    def __iter__(self) -> Iterator[Operation]:
        return iter(list(self._operations.values()))

    def __contains__(self, operation: object) -> bool:
        return operation in self._all


registry: Registry = Registry()


def operation_for(declaration: str | Operation, arguments: TaskArguments, use: Use = Use.REQUEST) -> Operation:
    """Find or declare the operation of ``@idempotent``, ``claim()`` or ``@idempotent_task``.

    A name without arguments, or with the declared arguments, refers to the declared operation.

    :raises ImproperlyConfigured: an argument has no effect for this use, or contradicts the declaration; or an
        ``Operation`` that needs the sweep is not declared.
    """
    if isinstance(declaration, Operation):
        if arguments:
            raise ImproperlyConfigured(
                f"Operation {declaration.name!r} has its own policy. Remove the other arguments."
            )
        _refuse_without_effect(declaration.name, declaration.declared, use)
        if declaration not in registry:
            if not declaration.declared["transaction"]:  # so it needs the sweep, which imports no views
                raise ImproperlyConfigured(
                    f"Operation {declaration.name!r} has transaction=False and is not declared, so no sweep would find "
                    f"it. Make it with Operation.declare({declaration.name!r}, ...) in an app's operations.py."
                )
            registry.add(declaration)
        return declaration
    _refuse_without_effect(declaration, arguments, use)
    known = registry.get(declaration) if isinstance(declaration, str) else None
    if known is not None:
        _refuse_without_effect(known.name, known.declared, use)
    if known is not None and (not arguments or _checked(known.name, arguments) == known.declared):
        return known
    return Operation.declare(declaration, **arguments)


#: The uses, as messages name them.
_USES: Final = {Use.BLOCK: "a claim() block", Use.TASK: "a task"}


def _refuse_without_effect(name: str, arguments: Mapping[str, Any], use: Use) -> None:
    """:raises ImproperlyConfigured: an argument has no effect for this use."""
    if use is Use.REQUEST:
        return
    given = [option for option in OPTIONS if arguments.get(option) is not None]
    wrong = [f"{option}=" for option in given if not OPTIONS[option].applies_to & use]
    if arguments.get("in_progress") is ACCEPTED:
        wrong.append("in_progress=ACCEPTED")
    if wrong:
        raise ImproperlyConfigured(
            f"Operation {name!r}: {', '.join(wrong)} has no effect on {_USES[use]}. Leave it out, or declare another "
            f"operation for requests."
        )
