"""``Operation``: the declared policy of one protected operation, and the registry of them.

Imports no models, so an app can declare its operations in an ``operations.py`` that every process discovers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeAlias

from django.core.exceptions import ImproperlyConfigured

from .conf import resolve, settings
from .lifecycle import Recovery

MAX_NAME_LENGTH = 255
#: A bounded wait holds a worker; past this a client's own timeout would have cut it off anyway.
MAX_WAIT = timedelta(seconds=30)

REEXECUTE = Recovery.REEXECUTE
PARK = Recovery.PARK

#: How many attempts a record may have had, runs and reconciliations together, before an ``Unknown`` parks it. With the
#: backoff between them, an operation that was run once is asked about seven times in about four minutes.
DEFAULT_MAX_ATTEMPTS = 8


@dataclass(frozen=True)
class Completed:
    """A reconciler's finding: it happened, and this is its outcome.

    ``response`` is the ``HttpResponse`` that every retry gets, or, for a ``claim()`` block, its JSON result.
    """

    response: Any


@dataclass(frozen=True)
class NotExecuted:
    """A reconciler's finding: it certainly did not happen, and certainly will not any more. A retry runs it."""


@dataclass(frozen=True)
class Unknown:
    """A reconciler's finding: nobody can say yet. Asked again later, and parked after a bounded number of attempts."""


Finding: TypeAlias = Completed | NotExecuted | Unknown


@dataclass(frozen=True)
class Reconcile:
    """Ask the outside world what became of an abandoned claim.

    :param find_out: ``callable(record: IdempotencyRecord) -> Completed | NotExecuted | Unknown``. Runs outside of any
        transaction, one at a time for a record, under a lease of its own, and may be killed and called again. What it
        raises is an ``Unknown``. ``NotExecuted`` must mean that the first call will not arrive later either.
    :param max_attempts: an ``Unknown`` parks a record that has had this many attempts.
    """

    find_out: Callable[[Any], Finding]
    max_attempts: int = DEFAULT_MAX_ATTEMPTS

    def __post_init__(self) -> None:
        if not callable(self.find_out):
            raise ImproperlyConfigured(f"Reconcile() takes a callable, not {self.find_out!r}.")
        if not isinstance(self.max_attempts, int) or isinstance(self.max_attempts, bool) or self.max_attempts < 1:
            raise ImproperlyConfigured(f"Reconcile(max_attempts=) takes a positive number, not {self.max_attempts!r}.")


class InProgress(Enum):
    """What a duplicate is told while another attempt runs."""

    CONFLICT = 409
    ACCEPTED = 202


CONFLICT = InProgress.CONFLICT
ACCEPTED = InProgress.ACCEPTED


@dataclass(frozen=True)
class Wait:
    """Hold a duplicate for up to ``seconds`` for the outcome, then answer 409."""

    seconds: float

    def __post_init__(self) -> None:
        valid = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not valid or not 0 < self.seconds <= MAX_WAIT.total_seconds():
            raise ImproperlyConfigured(
                f"Wait(seconds) takes a number above 0 and up to {MAX_WAIT.total_seconds():.0f}, not {self.seconds!r}."
            )


@dataclass(frozen=True)
class Attach:
    """The operation starts a job. Its first request is answered 202, and so is every duplicate until the job ends.

    What is recorded is that the job was started, with a reference to it; the operation's ``rebuild`` turns that into
    202 while the job runs, and into its outcome afterwards.

    :param location: ``callable(scope: Scope) -> str``: the job's address, a path or a URL. Made of the scope alone, as
        by ``scope.derive_key("job")``, because a duplicate may need it before the first request has committed.
    """

    location: Callable[[Any], str]

    def __post_init__(self) -> None:
        if not callable(self.location):
            raise ImproperlyConfigured(f"Attach(location) takes a callable, not {self.location!r}.")


InProgressAnswer: TypeAlias = InProgress | Wait | Attach


def problem_of(option: str, value: Any) -> str | None:
    """What is wrong with ``value`` as the policy option ``option``, or None. Shared with the system checks."""
    if option in {"ttl", "lease", "heartbeat", "idle_timeout", "max_retry_after"}:
        if not isinstance(value, timedelta) or value <= timedelta(0):
            return "must be a positive timedelta"
    elif option == "max_body":
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            return "must be a positive number of bytes"
    elif option in {"transaction", "required"}:
        if not isinstance(value, bool):
            return "must be True or False"
    elif option == "recovery":
        if value not in (REEXECUTE, PARK) and not isinstance(value, Reconcile):
            return "must be REEXECUTE, PARK or Reconcile(fn)"
    elif option == "in_progress":
        if not isinstance(value, (InProgress, Wait, Attach)):
            return "must be CONFLICT, ACCEPTED, Wait(seconds) or Attach(location)"
    elif option in {"methods", "headers"}:
        names = None if isinstance(value, (str, bytes)) or not isinstance(value, Collection) else list(value)
        if names is None or not all(isinstance(name, str) and name for name in names):
            return "must be a collection of names"
        if option == "methods" and (not names or any(name != name.upper() for name in names)):
            return "must name at least one HTTP method, in capitals"
    elif option in {"account", "recordable", "error_response"}:
        if not callable(value) and not isinstance(value, str):
            return "must be a callable or a dotted path to one"
    elif not callable(value):
        return "must be a callable"
    return None


class Operation:
    """The policy of one operation.

    Every argument left out follows the setting of the same meaning at the time of the request; the settings and their
    defaults are in the documentation's table.

    :param name: part of every record's identity; 1 to 255 printable characters. Renaming an operation forgets its
        records.
    :param ttl: how long an outcome is kept and a retry recognised.
    :param lease: how long a claim is presumed alive without a sign of life.
    :param heartbeat: renews the lease in the background while the handler runs, up to this long in total. Without it
        a handler that takes longer than its lease calls ``current_claim().renew()``, or is taken over.
    :param idle_timeout: lets PostgreSQL end the handler's transaction when it has been idle for that long, as a frozen
        process's is, and any statement of it that runs for longer than the lease, so that its locks don't outlive its
        lease. Costs a statement; a default for the role costs none.
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
    :raises ImproperlyConfigured: when an argument is not of its kind, when ``transaction=False`` comes without
        ``recovery``, or when the name is declared already with another policy.
    """

    def __init__(
        self,
        name: str,
        *,
        ttl: timedelta | None = None,
        lease: timedelta | None = None,
        heartbeat: timedelta | None = None,
        idle_timeout: timedelta | None = None,
        transaction: bool = True,
        recovery: Recovery | Reconcile | None = None,
        in_progress: InProgressAnswer | None = None,
        required: bool | None = None,
        methods: Collection[str] | None = None,
        command: Callable[..., Any] | None = None,
        account: Callable[[Any], str | None] | str | None = None,
        recordable: Callable[[int], bool] | str | None = None,
        headers: Collection[str] | None = None,
        max_body: int | None = None,
        rebuild: Callable[[str, Any], Any] | None = None,
    ) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise ImproperlyConfigured(
                f"An operation's name is 1 to {MAX_NAME_LENGTH} printable characters, not {name!r}."
            )
        self.name = name
        self.declared: dict[str, Any] = {
            "ttl": ttl,
            "lease": lease,
            "heartbeat": heartbeat,
            "idle_timeout": idle_timeout,
            "transaction": transaction,
            "recovery": recovery,
            "in_progress": in_progress,
            "required": required,
            "methods": methods,
            "command": command,
            "account": account,
            "recordable": recordable,
            "headers": headers,
            "max_body": max_body,
            "rebuild": rebuild,
        }
        for option, value in self.declared.items():
            if value is not None and (problem := problem_of(option, value)):
                raise ImproperlyConfigured(f"Operation {name!r}: {option} {problem}, not {value!r}.")
        if not transaction and recovery is None:
            raise ImproperlyConfigured(
                f"Operation {name!r} has transaction=False, so a crash can leave an effect without an outcome. "
                f"Say what that means with recovery=: REEXECUTE if every effect carries a key derived from the claim, "
                f"Reconcile(fn) if fn can ask what happened, PARK if it must never run again by itself."
            )
        if isinstance(in_progress, Attach) and rebuild is None:
            raise ImproperlyConfigured(
                f"Operation {name!r} attaches duplicates to a job, so it needs rebuild=: callable(reference, request) "
                f"that answers 202 while the job runs, and with its outcome afterwards."
            )
        if ttl is not None and lease is not None and lease >= ttl:
            raise ImproperlyConfigured(f"Operation {name!r}: lease must be shorter than ttl.")
        registry.add(self)

    def __repr__(self) -> str:
        return f"<Operation {self.name!r}>"

    def _value(self, option: str, setting: str | None = None) -> Any:
        declared = self.declared[option]
        return getattr(settings, setting or option) if declared is None else declared

    @property
    def ttl(self) -> timedelta:
        value: timedelta = self._value("ttl")
        return value

    @property
    def lease(self) -> timedelta:
        value: timedelta = self._value("lease")
        return value

    @property
    def heartbeat(self) -> timedelta | None:
        value: timedelta | None = self.declared["heartbeat"]
        return value

    @property
    def idle_timeout(self) -> timedelta | None:
        value: timedelta | None = self.declared["idle_timeout"]
        return value

    @property
    def transaction(self) -> bool:
        value: bool = self.declared["transaction"]
        return value

    @property
    def recovery(self) -> Recovery:
        """What an abandoned claim means, without the particulars of a ``Reconcile``."""
        declared: Recovery | Reconcile | None = self.declared["recovery"]
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

    @property
    def in_progress(self) -> InProgressAnswer:
        value: InProgressAnswer = self._value("in_progress")
        return value

    @property
    def required(self) -> bool:
        value: bool = self._value("required")
        return value

    @property
    def methods(self) -> Collection[str]:
        value: Collection[str] = self._value("methods")
        return value

    @property
    def command(self) -> Callable[..., Any] | None:
        value: Callable[..., Any] | None = self.declared["command"]
        return value

    @property
    def account(self) -> Callable[[Any], str | None]:
        value: Callable[[Any], str | None] = resolve(self._value("account"))
        return value

    @property
    def recordable(self) -> Callable[[int], bool]:
        value: Callable[[int], bool] = resolve(self._value("recordable"))
        return value

    @property
    def headers(self) -> Collection[str]:
        value: Collection[str] = self._value("headers", "recorded_headers")
        return value

    @property
    def max_body(self) -> int:
        value: int = self._value("max_body")
        return value

    @property
    def rebuild(self) -> Callable[[str, Any], Any] | None:
        value: Callable[[str, Any], Any] | None = self.declared["rebuild"]
        return value


class Registry:
    """The declared operations of this process, by name."""

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}

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

    def __iter__(self) -> Iterator[Operation]:
        return iter(list(self._operations.values()))


registry = Registry()


def operation_for(declaration: str | Operation, policy: dict[str, Any]) -> Operation:
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
