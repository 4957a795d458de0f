"""A small payments API that shows the package at work, and that its demo and tests drive."""

from __future__ import annotations

try:
    from .celery import app as celery_app
except ModuleNotFoundError as error:
    # The sample runs without Celery, and then publishes nothing.
    if error.name != "celery":
        raise
else:
    __all__ = ["celery_app"]
