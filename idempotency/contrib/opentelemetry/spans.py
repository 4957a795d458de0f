"""What happens to a record, as attributes and events of the span in which it happens.

No span is made here. Where none is recording, nothing is done. Neither accounts nor keys are recorded. They are
private, and somebody who knows a key can get its outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry import trace

from ...operation import Operation
from ...upkeep.counters import Counters

OPERATION = "idempotency.operation"
ATTEMPT = "idempotency.attempt"
#: The latest event of the span's operation, by the name of its signal, such as "completed" or "replayed".
RESULT = "idempotency.result"


def connect() -> None:
    """Record from now on. Called again, it does nothing."""
    for event, signal in Counters.WATCHED.items():
        signal.connect(_receiver(event), weak=False, dispatch_uid=f"idempotency.opentelemetry.span.{event}")


def _receiver(event: str) -> Callable[..., None]:
    def note(sender: Operation | None, attempt: int, **arguments: Any) -> None:
        span = trace.get_current_span()
        if not span.is_recording():
            return
        attributes: dict[str, str | int] = {OPERATION: "" if sender is None else sender.name, ATTEMPT: attempt}
        span.set_attributes({**attributes, RESULT: event})
        span.add_event(f"idempotency.{event}", attributes)

    return note
