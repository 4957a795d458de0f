"""A view for Prometheus to scrape, needed for servers with several processes."""

from __future__ import annotations

import os

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from .exporter import StatsCollector


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Return all metrics of the project, including other packages' metrics.

    If ``PROMETHEUS_MULTIPROC_DIR`` is set, the counters of all processes are added up from their files. The registry
    for that has no collectors, so the collector of the gauges is added here.

    Access is not restricted. Ensure that only Prometheus can reach this view.

    :raises ImproperlyConfigured: the app is not installed.
    """
    if not apps.is_installed("idempotency.contrib.prometheus"):
        raise ImproperlyConfigured(
            "Add 'idempotency.contrib.prometheus' to INSTALLED_APPS, so that a scrape includes this package's metrics."
        )
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(StatsCollector())
    try:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    except (TypeError, ValueError):  # an invalid version number
        encode, content_type = choose_encoder("")
    return HttpResponse(encode(registry), content_type=content_type)
