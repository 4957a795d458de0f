"""Traces: events of records on the current span, and messages that carry their producer's context.

No span is started here. Accounts and keys are not recorded, because they are private, and a key gives access to its
outcome.

A message carries the W3C trace context. The project's propagators are not used, because this package both writes and
reads the context. Baggage is omitted, because it may be private and the outbox stores the headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ... import signals
from ...extensions import Message
from ...foreign import behind_proxy
from ...operation import Operation

OPERATION = "idempotency.operation"
ATTEMPT = "idempotency.attempt"
#: The latest event of the span's operation, such as "completed" or "replayed".
RESULT = "idempotency.result"

PROPAGATOR = TraceContextTextMapPropagator()


def note_on_span(operation: str, event: str, attempt: int) -> None:
    span = trace.get_current_span()
    if span.is_recording():
        attributes: dict[str, str | int] = {OPERATION: operation, ATTEMPT: attempt}
        span.set_attributes({**attributes, RESULT: event})
        span.add_event(f"idempotency.{event}", attributes)


def context_of_producer(headers: Mapping[Any, Any]) -> Context | None:
    """The context in the headers of a message, or None if they contain no valid context.

    :param headers: untrusted input. Names and values that are not text are ignored.
    """
    texts = {name.lower(): value for name, value in headers.items() if isinstance(name, str) and isinstance(value, str)}
    context = PROPAGATOR.extract(texts, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def link_to_producer(headers: Mapping[Any, Any]) -> None:
    """Link the current span to the span that published a message. For consumers other than Celery tasks.

    Does nothing if no span is recording, or if the headers have no valid context.

    :param headers: the headers of the message, as text.
    """
    span = trace.get_current_span()
    if span.is_recording() and (context := context_of_producer(headers)) is not None:
        span.add_link(trace.get_current_span(context).get_span_context())


def connect_celery() -> None:
    """Link the span of an idempotent task to the span that published its message. Idempotent."""
    from celery import current_task

    from ..celery.messages import headers_of
    from ..celery.policy import policy_of

    def link(sender: Operation, **arguments: Any) -> None:
        task: Any = behind_proxy(current_task) if current_task else None
        policy = policy_of(task)
        if policy is not None and policy.operation is sender:  # not another operation that the task runs
            link_to_producer(headers_of(task.request))

    # The first signal of a delivery is one of these.
    for signal in (signals.claimed, signals.taken_over, signals.replayed, signals.conflicted, signals.key_reused):
        signal.connect(link, weak=False, dispatch_uid="idempotency.opentelemetry.link")


def current_context() -> Mapping[str, str]:
    carrier: dict[str, str] = {}
    if trace.get_current_span().is_recording():
        PROPAGATOR.inject(carrier)
    return carrier


@contextmanager
def sending(message: Message) -> Iterator[None]:
    token = context.attach(context_of_producer(message.headers) or context.get_current())
    try:
        yield
    finally:
        context.detach(token)
