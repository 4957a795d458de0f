"""Django REST framework: ``IdempotentMixin``, and the adapter with which ``@idempotent`` protects DRF views.

``view_classes`` says which handlers of a class are protected. ``adapter`` translates between the core and DRF for one
request. ``commands`` reads a payload through a serializer's fields. ``object_checks`` finds the object of a view, whose
checks are made before a replay. ``key_status`` is the view of a key's status.
"""

from .. import needing

with needing("drf"):
    import rest_framework  # noqa: F401

from ...http.view_classes import EVERY, IdempotentMixin
from .adapter import IdempotencyAPIException, RestFrameworkAdapter
from .commands import declared_fields
from .key_status import KeyStatusView

__all__ = [
    "EVERY",
    "IdempotencyAPIException",
    "IdempotentMixin",
    "KeyStatusView",
    "RestFrameworkAdapter",
    "declared_fields",
]
