"""The outbox: a message is published if and only if the transaction that published it committed."""

from __future__ import annotations

from .publishing import CELERY, alias, publish

__all__ = ["CELERY", "alias", "publish"]
