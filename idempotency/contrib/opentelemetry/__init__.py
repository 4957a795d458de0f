"""OpenTelemetry: events of records on the request's span; links from messages to their producers.

An app: add ``"idempotency.contrib.opentelemetry"`` to ``INSTALLED_APPS``. Uses OpenTelemetry's API; the project chooses
the SDK and the instrumentation.
"""

from typing import TYPE_CHECKING

from .. import needing

with needing("opentelemetry"):
    import opentelemetry.trace  # noqa: F401

from ...public import Getter, lazy

if TYPE_CHECKING:
    from .tracing import link_to_producer

__all__ = ["link_to_producer"]

__getattr__: Getter = lazy(__name__, {"link_to_producer": "tracing"})
