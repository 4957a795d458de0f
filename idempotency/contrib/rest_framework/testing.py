"""``IdempotentAPIClient``: DRF's test client with keys."""

from __future__ import annotations

from rest_framework.test import APIClient

from ...testing import IdempotentClientMixin


class IdempotentAPIClient(IdempotentClientMixin, APIClient):
    """DRF's test client with keys. Set it as ``client_class`` of an ``APITestCase``.

    A key in ``credentials()`` is sent with every request, unchanged.
    """
