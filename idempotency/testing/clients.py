"""Test clients that send an ``Idempotency-Key`` with each mutating request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.test import Client

from ..http.class_views import SAFE_METHODS
from ..identity import keys, timed

if TYPE_CHECKING:
    _Base = Client
else:
    _Base = object


class IdempotentClientMixin(_Base):
    """Adds a new ``Idempotency-Key`` to each mutating request that has none, before a test client sends it.

    Put it before Django's ``Client`` or Django REST framework's ``APIClient`` among the bases of a class. A protected
    view echoes the key in its response, so a retry is sent with
    ``headers={"Idempotency-Key": first["Idempotency-Key"]}``.
    """

    def request(self, **request: Any) -> Any:
        sent = {**self.defaults, **request}
        if sent.get("REQUEST_METHOD", "GET") not in SAFE_METHODS and keys.META_NAME not in sent:
            request[keys.META_NAME] = timed.new_key()
        return super().request(**request)


class IdempotentClient(IdempotentClientMixin, Client):
    """Django's test client with keys. A ``TestCase`` uses it if its ``client_class`` is this class."""
