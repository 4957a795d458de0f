"""What befalls a relay, and a look at a message that it had."""

from __future__ import annotations

import pytest

from idempotency.exceptions import BrokerUnavailableError
from idempotency.models import OutboxMessage
from idempotency.outbox.relay import relay_once

BROKEN = ConnectionError("no route")
UNREACHABLE = BrokerUnavailableError("no route")


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


def kill() -> None:
    raise Killed


def relay_killed() -> None:
    with pytest.raises(Killed):
        relay_once()


def message(pk: int) -> OutboxMessage:
    return OutboxMessage.objects.get(pk=pk)
