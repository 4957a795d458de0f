"""The words that an operation's policy is written in: what an abandoned claim means, and what a duplicate is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeAlias

from django.core.exceptions import ImproperlyConfigured

from ..lifecycle import Recovery

REEXECUTE = Recovery.REEXECUTE
PARK = Recovery.PARK

#: How many attempts a record may have had, runs and reconciliations together, before an ``Unknown`` parks it. With the
#: backoff between them, an operation that was run once is asked about seven times in about four minutes.
DEFAULT_MAX_ATTEMPTS = 8

#: A bounded wait holds a worker. A client's own timeout is usually 30 s, so a longer wait would answer nobody.
MAX_WAIT = timedelta(seconds=30)


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
