"""The values of ``recovery``, ``in_progress`` and ``profile``, and the headers that are never recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeAlias

from django.core.exceptions import ImproperlyConfigured

from ..lifecycle import Recovery

#: The names of the profiles. ``http.problems`` has their tables.
IETF = "ietf"
STRIPE = "stripe"
ACP = "acp"

REEXECUTE = Recovery.REEXECUTE
PARK = Recovery.PARK

#: ``Unknown`` parks a record after this many runs and reconciliations. After one run, the reconciler is called seven
#: times within about four minutes, because of the backoff.
DEFAULT_MAX_ATTEMPTS = 8

#: Refused as names and never matched by patterns, because credentials must not be replayed.
NEVER_RECORDED_HEADERS = frozenset({"set-cookie", "authorization", "proxy-authorization", "www-authenticate", "cookie"})

#: A waiting request occupies a worker, and clients usually give up after 30 s.
MAX_WAIT = timedelta(seconds=30)


@dataclass(frozen=True)
class Completed:
    """A reconciler's finding: the operation took effect, with this outcome.

    :param response: the ``HttpResponse`` for every retry, or the JSON result of a ``claim()`` block.
    """

    response: Any


@dataclass(frozen=True)
class NotExecuted:
    """A reconciler's finding: the operation did not take effect, and can't do so later. A retry runs it."""


@dataclass(frozen=True)
class Unknown:
    """A reconciler's finding: not known yet. It is called again later, until ``max_attempts`` parks the record."""


Finding: TypeAlias = Completed | NotExecuted | Unknown


@dataclass(frozen=True)
class Reconcile:
    """Find out from an external system whether an abandoned claim took effect.

    :param find_out: ``callable(record: IdempotencyRecord) -> Completed | NotExecuted | Unknown``, the reconciler. It
        runs outside of any transaction, under a lease, and only once at a time for a record. It may be killed and
        called again. An error counts as ``Unknown``. It may return ``NotExecuted`` only if the first call can't arrive
        later.
    :param max_attempts: ``Unknown`` parks a record after this many runs and reconciliations together.
    :raises ImproperlyConfigured: an argument has a wrong value.
    """

    find_out: Callable[[Any], Finding]
    max_attempts: int = DEFAULT_MAX_ATTEMPTS

    def __post_init__(self) -> None:
        if not callable(self.find_out):
            raise ImproperlyConfigured(f"Reconcile() takes a callable, not {self.find_out!r}.")
        if not isinstance(self.max_attempts, int) or isinstance(self.max_attempts, bool) or self.max_attempts < 1:
            raise ImproperlyConfigured(f"Reconcile(max_attempts=) takes a positive number, not {self.max_attempts!r}.")


class InProgress(Enum):
    """The status that a duplicate gets while another attempt runs."""

    CONFLICT = 409
    ACCEPTED = 202


CONFLICT = InProgress.CONFLICT
ACCEPTED = InProgress.ACCEPTED


@dataclass(frozen=True)
class Wait:
    """A duplicate waits for the outcome for up to ``seconds`` and then gets 409.

    :param seconds: above 0 and up to 30.
    :raises ImproperlyConfigured: the number is out of range.
    """

    seconds: float

    def __post_init__(self) -> None:
        valid = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not valid or not 0 < self.seconds <= MAX_WAIT.total_seconds():
            raise ImproperlyConfigured(
                f"Wait(seconds) takes a number above 0 and up to {MAX_WAIT.total_seconds():.0f}, not {self.seconds!r}."
            )


@dataclass(frozen=True)
class Attach:
    """The operation starts a job. The first request and every duplicate get 202 until the job ends.

    The recorded outcome is a reference to the job. ``rebuild`` turns it into 202 while the job runs, and into the job's
    outcome afterwards.

    :param location: ``callable(scope: Scope) -> str``. Returns the job's path or URL. It may use only the scope, for
        example ``scope.derive_key("job")``, because a duplicate may need the address before the first request commits.
    :raises ImproperlyConfigured: the location is not callable.
    """

    location: Callable[[Any], str]

    def __post_init__(self) -> None:
        if not callable(self.location):
            raise ImproperlyConfigured(f"Attach(location) takes a callable, not {self.location!r}.")


InProgressAnswer: TypeAlias = InProgress | Wait | Attach
