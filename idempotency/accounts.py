"""Values of ``account``: they identify the caller that a key belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .public import Getter, lazy

if TYPE_CHECKING:
    from .conf import authenticated_user
    from .http.accounts import (
        FirstOf,
        Fixed,
        FromRoute,
        FromToken,
        InTenant,
        api_key,
        remember_visitor,
        user_or_visitor,
    )

__all__ = [
    "FirstOf",
    "Fixed",
    "FromRoute",
    "FromToken",
    "InTenant",
    "api_key",
    "authenticated_user",
    "remember_visitor",
    "user_or_visitor",
]

# The default is imported without ``http``, because a queue worker doesn't need it.
__getattr__: Getter = lazy(
    __name__, dict.fromkeys(__all__, "http.accounts") | {"authenticated_user": "conf"}, package="idempotency"
)
