"""``IdempotentAPIClient``: Django REST framework's test client with keys."""

from __future__ import annotations

from rest_framework.test import APIClient

from ...testing import IdempotentClientMixin


class IdempotentAPIClient(IdempotentClientMixin, APIClient):
    """Django REST framework's test client with keys. An ``APITestCase`` uses it if its ``client_class`` is this class.

    A key in ``credentials()`` is sent with every request, as it is.
    """
