"""``IdempotentMixin``: the protected handlers of a DRF view class, named in one mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured

from ...http.decorators import Protected, exempt_from_atomic_requests
from ...operation import Operation, operation_for


class IdempotentMixin:
    """Protect handlers of an APIView or ViewSet, named in ``idempotent_operations``.

    Keys are a ViewSet's actions, or an APIView's methods in lower case; values are names or ``Operation`` objects::

        class ChargeViewSet(IdempotentMixin, viewsets.ModelViewSet):
            idempotent_operations = {"create": "charges.create"}
    """

    idempotent_operations: ClassVar[Mapping[str, str | Operation]] = {}
    _protected_handlers: ClassVar[dict[str, Protected]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._protected_handlers = {}
        for name in cls.idempotent_operations:
            if hasattr(cls, "as_view") and not hasattr(cls, name):
                raise ImproperlyConfigured(
                    f"{cls.__name__}.idempotent_operations names {name!r}, and {cls.__name__} has no such handler."
                )
            cls.idempotent_operation(name)  # declared when the class is made, not at the first request
        exempt_from_atomic_requests(cls)

    @classmethod
    def idempotent_operation(cls, name: str) -> Operation | None:
        """The operation of the handler ``name``, or None where it isn't protected by the mixin."""
        declaration = cls.idempotent_operations.get(name)
        return None if declaration is None else operation_for(declaration, {})

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)  # type: ignore[misc]
        method = request.method.lower()
        name = getattr(self, "action", None) or method
        if name not in self.idempotent_operations:
            return
        handler = getattr(type(self), name, None)
        if handler is None or isinstance(handler, Protected):
            return
        # dispatch() looks the handler up on this instance, which serves one request, right after initial().
        setattr(self, method, MethodType(self._protected(name, handler), self))

    @classmethod
    def _protected(cls, name: str, handler: Callable[..., Any]) -> Protected:
        known = cls._protected_handlers.get(name)
        if known is None or known.view is not handler:  # made once a class, and again if the handler was replaced
            operation = cls.idempotent_operation(name)
            assert operation is not None  # the name is one of the mapping's
            known = cls._protected_handlers[name] = Protected(operation, handler)
        return known
