"""OpenTelemetry: events on the caller's span, and links from messages to their producers."""

from importlib import import_module

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from idempotency import claim
from idempotency.contrib.opentelemetry import link_to_producer
from idempotency.contrib.opentelemetry.apps import OpenTelemetryConfig
from idempotency.exceptions import KeyReusedError
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.relay import relay_once
from tests.contrib import consumers
from tests.database.publishing import send
from tests.outbox import broker

# ``test_prometheus`` counts the tables' rows on each database.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("_as_if_off"), pytest.mark.once]

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorded:
    """An SDK in memory. It doesn't set the process's global providers, which can be set only once."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def span(self, name="request"):
        return self.provider.get_tracer("tests").start_as_current_span(name)

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def recorded():
    recorded = Recorded()
    module = "idempotency.contrib.opentelemetry"
    for _ in range(2):  # a second ready() changes nothing
        OpenTelemetryConfig(module, import_module(module)).ready()
    broker.reset()
    yield recorded
    recorded.provider.shutdown()


def test_the_callers_span_has_the_event_and_nothing_private(recorded):
    def run(payload):
        with claim("tests.spans", account_id="private-account", key="private-key", payload=payload) as one:
            if not one.replayed:
                one.result = None

    with recorded.span("first"):
        run(1)
    with recorded.span("retry"):
        run(1)
    with recorded.span("reused"), pytest.raises(KeyReusedError):
        run(2)
    run(1)  # without a recording span, none is made
    recorded_events = {
        name: ([event.name for event in span.events], dict(span.attributes)) for name, span in recorded.spans().items()
    }
    of = {"idempotency.operation": "tests.spans", "idempotency.attempt": 1}
    assert recorded_events == {
        "first": (["idempotency.claimed", "idempotency.completed"], {**of, "idempotency.result": "completed"}),
        "retry": (["idempotency.replayed"], {**of, "idempotency.result": "replayed"}),
        "reused": (["idempotency.key_reused"], {**of, "idempotency.result": "key_reused"}),
    }
    assert all(dict(event.attributes) == of for span in recorded.spans().values() for event in span.events)
    assert "private" not in "".join(span.to_json() for span in recorded.spans().values())


def test_a_message_carries_its_producers_context_and_is_sent_in_it(recorded):
    seen = []
    broker.answer = lambda message: seen.append(trace.get_current_span().get_span_context())
    with recorded.span("producer"):
        send("a", headers={"tenant": "x"})
    send("b")  # no span, no header
    with recorded.span("relay") as relay:
        assert relay_once().sent == 2
        assert trace.get_current_span() is relay
    first, second = OutboxMessage.objects.order_by("pk").values_list("headers", flat=True)
    assert (set(first), second) == ({"tenant", "traceparent"}, {})
    producer = recorded.spans()["producer"].context
    assert [place.span_id for place in seen] == [producer.span_id, relay.get_span_context().span_id]
    assert seen[0].trace_id == producer.trace_id


def test_the_callers_header_overrides_the_added_one(recorded):
    with recorded.span():
        message = send(headers={"traceparent": PARENT})
    assert message.headers == {"traceparent": PARENT}


def test_a_failing_sender_leaves_the_relays_context_unchanged(recorded):
    send(payload=1, headers={"traceparent": PARENT})
    broker.refuse(1, error=ValueError())
    before = context.get_current()
    assert relay_once().postponed == 1
    assert context.get_current() == before


@pytest.mark.usefixtures("eager")
def test_an_idempotent_tasks_span_is_linked_to_its_messages_producer(recorded):
    for name in ("delivery", "redelivery"):
        with recorded.span(name):
            consumers.send.apply_async(["a"], task_id="one", headers={"traceparent": PARENT})
    for span in recorded.spans().values():
        assert [f"{link.context.span_id:x}" for link in span.links] == ["b7ad6b7169203331"]


@pytest.mark.parametrize(
    ("headers", "links"),
    [
        ({"Traceparent": PARENT, "Content-Type": "application/json"}, 1),
        ({}, 0),
        ({"traceparent": "00-0-0-0"}, 0),
        ({"traceparent": 7, 8: PARENT, b"traceparent": PARENT}, 0),
        ({"traceparent": [PARENT]}, 0),
    ],
)
def test_another_kind_of_consumer_links_to_the_trace_in_its_headers(recorded, headers, links):
    link_to_producer(headers)  # without a span, nothing is linked
    with recorded.span():
        link_to_producer(headers)
    assert len(recorded.spans()["request"].links) == links
