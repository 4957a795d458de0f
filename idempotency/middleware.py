"""``IdempotencyMiddleware``, for ``MIDDLEWARE``."""

from .http.middleware import IdempotencyMiddleware
from .public import adopt

__all__ = ["IdempotencyMiddleware"]

adopt(__name__, [IdempotencyMiddleware])
