"""Django REST framework: ``IdempotentMixin``, and the adapter with which ``@idempotent`` protects DRF views.

``view_classes`` says which handlers of a class are protected. ``adapter`` translates between the core and DRF for one
request. ``commands`` reads a payload through a serializer's fields.
"""

from .. import needing

with needing("drf"):
    import rest_framework  # noqa: F401

from .adapter import IdempotencyAPIException, KeyStatusView, RestFrameworkAdapter
from .commands import declared_fields
from .view_classes import IdempotentMixin

__all__ = ["IdempotencyAPIException", "IdempotentMixin", "KeyStatusView", "RestFrameworkAdapter", "declared_fields"]
