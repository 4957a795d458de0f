"""One path. What answers there is the operation of the cell that the process belongs to."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import path


def operate(request: HttpRequest) -> Any:
    """Be replaced by the worker, in its own process."""
    raise NotImplementedError


urlpatterns = [path("operate/", operate)]
