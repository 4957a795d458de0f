"""Fixtures for pytest, in every project that has this package: ``idempotent_client``, ``idempotent_api_client``.

pytest loads this module before Django's settings are known, so it imports what needs them at the first use.
"""

from typing import Any

import pytest


@pytest.fixture
def idempotent_client() -> Any:
    """An ``IdempotentClient``, which sends a new ``Idempotency-Key`` with each mutating request that has none."""
    from ..testing import IdempotentClient

    return IdempotentClient()


@pytest.fixture
def idempotent_api_client() -> Any:
    """The ``IdempotentAPIClient`` for Django REST framework."""
    from .rest_framework.testing import IdempotentAPIClient

    return IdempotentAPIClient()
