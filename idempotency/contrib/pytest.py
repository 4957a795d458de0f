"""Fixtures for pytest, in every project that has this package: ``idempotent_client``, ``idempotent_api_client``.

pytest loads this module before Django's settings are known, so it imports what needs them at the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from idempotency.testing import IdempotentClient

    from .rest_framework.testing import IdempotentAPIClient


@pytest.fixture
def idempotent_client() -> IdempotentClient:
    """Django's test client, which sends a new ``Idempotency-Key`` with each mutating request that has none."""
    from idempotency.testing import IdempotentClient

    return IdempotentClient()


@pytest.fixture
def idempotent_api_client() -> IdempotentAPIClient:
    """Django REST framework's test client with keys."""
    from .rest_framework.testing import IdempotentAPIClient

    return IdempotentAPIClient()
