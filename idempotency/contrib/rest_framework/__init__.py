"""Django REST framework: ``IdempotentMixin``, and the adapter with which ``@idempotent`` protects DRF views.

``mixin`` declares the protected handlers of a class. ``adapter`` translates between the core and DRF for one request.
``errors`` turns the package's errors into DRF's exceptions. ``commands`` reads a payload through a serializer's fields.
``throttling`` answers throttled retries. ``key_status`` is a view that tells what has become of a key.
"""

try:
    import rest_framework  # noqa: F401 - only to say what to install
except ImportError as error:  # pragma: no cover - the base environment has no DRF to fail without
    raise ImportError(
        "idempotency.contrib.rest_framework needs Django REST framework: pip install 'django-idempotency[drf]'"
    ) from error

from .adapter import RestFrameworkAdapter
from .commands import declared_fields
from .errors import IdempotencyAPIException
from .key_status import KeyStatusView
from .mixin import IdempotentMixin

__all__ = ["IdempotencyAPIException", "IdempotentMixin", "KeyStatusView", "RestFrameworkAdapter", "declared_fields"]
