"""For the tests of a project: does a protected view keep its promises, and what does a client get in each state?

``assert_idempotent`` sends a request in every way in which a request is repeated. ``in_progress``, ``abandoned``,
``expired``, ``completed`` and ``body_gone`` bring a record into a state. ``IdempotentClient`` is Django's test client
with keys. ``idempotency.contrib.rest_framework.testing`` has Django REST framework's, ``idempotency.contrib.pytest``
has fixtures.
"""

from __future__ import annotations

from .assertion import ChecksNotRunWarning, assert_idempotent
from .clients import IdempotentClient, IdempotentClientMixin
from .records import abandoned, body_gone, completed, expired, in_progress
from .report import Report
from .trial import Request

__all__ = [
    "ChecksNotRunWarning",
    "IdempotentClient",
    "IdempotentClientMixin",
    "Report",
    "Request",
    "abandoned",
    "assert_idempotent",
    "body_gone",
    "completed",
    "expired",
    "in_progress",
]
