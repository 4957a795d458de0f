"""For the tests of a project: does a protected view keep its promises, and what does a client get in each state?

``assert_idempotent`` sends a request in every way in which a request is repeated. ``in_progress``, ``abandoned``,
``expired`` and ``completed`` bring a record into a state. ``IdempotentClient`` is Django's test client with keys.
``idempotency.contrib.rest_framework`` has Django REST framework's, ``idempotency.contrib.pytest`` has fixtures.
"""

from __future__ import annotations

from typing import Any

from django.test import Client

from ..http.protection import SAFE_METHODS
from ..http.route_audit import Audit, AuditedRoute, Verdict, audit
from ..identity import keys
from ..public import adopt
from .checks import ChecksNotRunWarning, assert_idempotent
from .records import abandoned, completed, expired, in_progress
from .trial import Report, Request

__all__ = [
    "Audit",
    "AuditedRoute",
    "ChecksNotRunWarning",
    "IdempotentClient",
    "IdempotentClientMixin",
    "Report",
    "Request",
    "Verdict",
    "abandoned",
    "assert_idempotent",
    "audit",
    "completed",
    "expired",
    "in_progress",
]


class IdempotentClientMixin:
    """Adds a new ``Idempotency-Key`` to each mutating request that has none, before a test client sends it.

    Put it before Django's ``Client`` or Django REST framework's ``APIClient`` among the bases of a class. A protected
    view echoes the key in its response, so a retry is sent with
    ``headers={"Idempotency-Key": first["Idempotency-Key"]}``.
    """

    def request(self: Any, **request: Any) -> Any:
        sent = {**self.defaults, **request}
        if sent.get("REQUEST_METHOD", "GET") not in SAFE_METHODS and keys.META_NAME not in sent:
            request[keys.META_NAME] = keys.new_key()
        return super().request(**request)  # type: ignore[misc]


class IdempotentClient(IdempotentClientMixin, Client):
    """Django's test client with keys. A ``TestCase`` uses it if its ``client_class`` is this class."""


adopt(__name__, [*map(globals().get, __all__)])
