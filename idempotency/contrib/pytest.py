"""pytest fixtures: ``idempotent_client`` and ``idempotent_api_client``.

pytest loads this module before Django is configured, so imports that need settings are inside the fixtures.
"""

from typing import Any

import pytest


@pytest.fixture
def idempotent_client() -> Any:
    """An ``IdempotentClient``, which adds a new ``Idempotency-Key`` to each mutating request without one."""
    from ..testing import IdempotentClient

    return IdempotentClient()


@pytest.fixture
def idempotent_api_client() -> Any:
    """The ``IdempotentAPIClient`` for Django REST framework."""
    from .rest_framework.testing import IdempotentAPIClient

    return IdempotentAPIClient()
