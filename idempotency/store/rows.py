"""A record as a store reads it, the fence on each of its changes, and the errors that only a store can name."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from ..exceptions import UnavailableError
from ..identity.scope import Scope
from ..lifecycle import Status
from ..models import IdempotencyRecord
from ..outcome import Outcome

logger: Final = logging.getLogger("idempotency")


@dataclass(frozen=True)
class Fence:
    """The condition on every change of a record: it is still at this attempt of this request."""

    scope: Scope
    id: int
    attempt: int
    request_hash: str = field(repr=False)

    @classmethod
    def of(cls, record: IdempotencyRecord) -> Fence:
        """The fence for a record as it was read."""
        return cls(record.scope, record.pk, record.attempt, record.request_hash)


@dataclass(frozen=True)
class Row:
    """A record as read by a request that lost the claim. Its times are relative to the database's clock."""

    #: A change must match this, so that it applies only to the record as it was read.
    fence: Fence
    status: Status
    lease_left: float  # seconds; 0 or less if there is no lease or it has ended
    session: int | None  # in which the latest claim's handler runs, if the end of the session may end the lease
    retention_over: bool
    outcome: Outcome | None  # for a completed record only


def newer_record(what: str) -> UnavailableError:
    """The error for a record that this release can't interpret. A retry may reach a process of the newer release.

    :param what: the unknown part, for the log.
    """
    logger.error(
        "A record has %s, which this release doesn't know. A newer release wrote it. Nothing was run, and the client "
        "gets a 503 with Retry-After. Finish the deploy, or deploy the newer release again.",
        what,
    )
    return UnavailableError(retry_after=1)


@dataclass(eq=False)
class CommitError(Exception):
    """A COMMIT that the store itself sent failed, or its answer was lost."""

    error: Exception
    """The error from the database or the driver."""
