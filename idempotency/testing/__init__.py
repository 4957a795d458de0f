"""Tools for a project's tests.

``assert_idempotent`` repeats a request in every way that clients, networks and crashes do. ``in_progress``,
``abandoned``, ``expired`` and ``completed`` put a record into a state. ``IdempotentClient`` is Django's test client
with keys.
"""

from __future__ import annotations

from typing import Any

from django.test import Client

from ..http.protection import SAFE_METHODS
from ..identity import keys
from ..public import adopt
from ..views.route_audit import Audit, AuditedRoute, Verdict, audit
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
    """Adds a new ``Idempotency-Key`` to each mutating request without one.

    Put it before Django's ``Client`` or Django REST framework's ``APIClient`` among the bases of a class. A protected
    view echoes the key, so a retry is sent with ``headers={"Idempotency-Key": first["Idempotency-Key"]}``.
    """

    def request(self: Any, **request: Any) -> Any:
        sent = {**self.defaults, **request}
        if sent.get("REQUEST_METHOD", "GET") not in SAFE_METHODS and keys.META_NAME not in sent:
            request[keys.META_NAME] = keys.new_key()
        return super().request(**request)  # type: ignore[misc]


class IdempotentClient(IdempotentClientMixin, Client):
    """Django's test client with keys. Set it as the ``client_class`` of a ``TestCase``."""


adopt(__name__, [*map(globals().get, __all__)])
