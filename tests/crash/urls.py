"""One path. What answers there is the operation of the cell that the process belongs to."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import path

#: Set by the worker, in its own process.
views: dict[str, Any] = {}


def operate(request: HttpRequest) -> Any:
    return views["operate"](request)


urlpatterns = [path("operate/", operate)]
