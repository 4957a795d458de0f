"""The outbox: a message is published if and only if the transaction that published it committed.

``publishing`` writes messages. ``relay`` hands them to a broker. ``backlog`` counts waiting messages, requeues dead
ones and purges sent ones. To send through another broker, write a sender: a callable that takes a message and returns
when the broker has confirmed it. Name it by its dotted path in ``publish(sender=...)``.
"""

from __future__ import annotations

from .publishing import CELERY, alias, publish

__all__ = ["CELERY", "alias", "publish"]
