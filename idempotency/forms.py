"""``IdempotencyKeyMixin``: a hidden field with a key, for a form of a server-rendered page."""

from .http.forms import IdempotencyKeyMixin
from .public import adopt

__all__ = ["IdempotencyKeyMixin"]

adopt(__name__, [IdempotencyKeyMixin])
