"""Django REST framework: ``IdempotentMixin``, and the adapter with which ``@idempotent`` protects DRF views.

``view_classes`` says which handlers of a class are protected. ``adapter`` translates between the core and DRF for one
request. ``commands`` reads a payload through a serializer's fields.
"""

try:
    import rest_framework  # noqa: F401 - only to say what to install
except ImportError as error:  # pragma: no cover - the base environment has no DRF to fail without
    raise ImportError(
        "idempotency.contrib.rest_framework needs Django REST framework: pip install 'django-idempotency[drf]'"
    ) from error

from .adapter import IdempotencyAPIException, KeyStatusView, RestFrameworkAdapter
from .commands import declared_fields
from .view_classes import IdempotentMixin

__all__ = ["IdempotencyAPIException", "IdempotentMixin", "KeyStatusView", "RestFrameworkAdapter", "declared_fields"]
