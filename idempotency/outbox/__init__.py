"""The outbox: a message is published if and only if the transaction that published it committed.

``publishing`` writes messages, ``relay`` hands them to a broker, and ``backlog`` is for people: what is dead, and the
purge of what was sent. To send through another broker, write a sender: any callable that takes a message and returns
when it is confirmed, named by its dotted path in ``publish(sender=...)``.
"""

from __future__ import annotations

from .publishing import CELERY, alias, publish

__all__ = ["CELERY", "alias", "publish"]
