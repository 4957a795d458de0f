"""The outbox: a message carries the context of the span that published it, and is sent in that context.

So an instrumented client of a broker continues the trace of the operation, and not that of the relay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace

from ...models import OutboxMessage
from ...outbox.propagation import header_sources, sending_contexts
from .links import PROPAGATOR, context_of_producer


def connect() -> None:
    """Carry the context from now on. Called again, it does nothing."""
    if current_context not in header_sources:
        header_sources.append(current_context)
        sending_contexts.append(sending)


def current_context() -> Mapping[str, str]:
    """The headers for a message that is published now: none if no span is recording."""
    carrier: dict[str, str] = {}
    if trace.get_current_span().is_recording():
        PROPAGATOR.inject(carrier)
    return carrier


@contextmanager
def sending(message: OutboxMessage) -> Iterator[None]:
    """Send in the context of the message's producer, if the message carries one."""
    producer = context_of_producer(message.headers)
    if producer is None:
        yield
        return
    token = context.attach(producer)
    try:
        yield
    finally:
        context.detach(token)
