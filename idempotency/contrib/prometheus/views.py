"""A view for Prometheus to scrape. A server with several processes needs it. With one process, any exporter does."""

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
    """Answer with all metrics of the project, not only with those of this package.

    If ``PROMETHEUS_MULTIPROC_DIR`` is set, the counters of all processes are added up from their files. A registry for
    that has no collectors, so the one that reads the tables is added here. Otherwise the metrics are those
    of the default registry.

    Nothing restricts who may ask. Let only Prometheus reach this view.

    :raises ImproperlyConfigured: the app is not installed, so this package would count nothing.
    """
    if not apps.is_installed("idempotency.contrib.prometheus"):
        raise ImproperlyConfigured(
            "Add 'idempotency.contrib.prometheus' to INSTALLED_APPS. Without it nothing is counted, and a scrape would "
            "have no metric of this package."
        )
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(StatsCollector())
    try:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    except (TypeError, ValueError):  # of a version that is no number
        encode, content_type = choose_encoder("")
    return HttpResponse(encode(registry), content_type=content_type)
