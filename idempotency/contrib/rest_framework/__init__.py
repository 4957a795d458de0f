"""Django REST framework: the mixin, the routers, and the adapter with which ``@idempotent`` protects DRF views."""

from .. import needing

with needing("drf"):
    import rest_framework  # noqa: F401

from ...public import adopt
from ...views.view_classes import IdempotentMixin
from .adapter import IdempotencyAPIException
from .key_status import KeyStatusView

__all__ = ["IdempotencyAPIException", "IdempotentMixin", "KeyStatusView"]

adopt("idempotency", [IdempotentMixin])
adopt(__name__, [IdempotencyAPIException, KeyStatusView])
