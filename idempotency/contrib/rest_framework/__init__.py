"""Django REST framework: the mixin and the routers, and the adapter with which ``@idempotent`` protects DRF views.

``view_classes`` says which handlers of a class are protected. ``adapter`` translates between the core and DRF for one
request. ``commands`` reads a payload through a serializer's fields. ``object_checks`` finds the object of a view, whose
checks are made before a replay. ``key_status`` is the view of a key's status.
"""

from typing import TYPE_CHECKING

from .. import needing

with needing("drf"):
    import rest_framework  # noqa: F401

from ...http.view_classes import EVERY, IdempotentMixin
from ...public import Getter, adopt, lazy
from .adapter import IdempotencyAPIException
from .key_status import KeyStatusView

if TYPE_CHECKING:
    from .testing import IdempotentAPIClient

__all__ = ["EVERY", "IdempotencyAPIException", "IdempotentAPIClient", "IdempotentMixin", "KeyStatusView"]

adopt("idempotency", [IdempotentMixin])
adopt(__name__, [IdempotencyAPIException, KeyStatusView])

__getattr__: Getter = lazy(__name__, {"IdempotentAPIClient": "testing"})
