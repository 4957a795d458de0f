"""The context of a message's producer, as the message's headers carry it.

It is W3C's trace context whatever propagators the project has configured, because both ends are here. Baggage is not
carried: it may be private, and the headers are stored in the outbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PROPAGATOR = TraceContextTextMapPropagator()


def context_of_producer(headers: Mapping[Any, Any]) -> Context | None:
    """The context that the headers of a message carry.

    :param headers: any mapping. They are input from outside, so what is not text is ignored.
    :returns: None if they carry no valid context.
    """
    texts = {name.lower(): value for name, value in headers.items() if isinstance(name, str) and isinstance(value, str)}
    context = PROPAGATOR.extract(texts, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def link_to_producer(headers: Mapping[Any, Any]) -> None:
    """Link the current span to the span that published a message. Call this in a consumer that is no Celery task.

    It does nothing if no span is recording, or if the headers carry no valid context.

    :param headers: the headers of the message, as text.
    """
    span = trace.get_current_span()
    if span.is_recording() and (context := context_of_producer(headers)) is not None:
        span.add_link(trace.get_current_span(context).get_span_context())
