"""Django REST framework: the mixin, the routers, and the adapter with which ``@idempotent`` protects DRF views."""

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
