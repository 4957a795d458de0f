"""``IdempotentMixin``: the protected handlers of a view class, named in one mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.views import View

from ...http.class_views import guard, operation_of, refuse_handler
from ...http.decorators import Protected
from ...operation import Operation, operation_for, registry

if TYPE_CHECKING:  # Python 3.10 has no Self, and only a type checker reads it
    from typing_extensions import Self

T = TypeVar("T")


# This is not a docstring, because API schemas and DRF's own pages would show it as the description of views without
# one.
#
# The mixin protects the handlers of an APIView or a ViewSet that ``idempotent_operations`` names. Its keys are the
# actions of a ViewSet or the methods of an APIView in lower case. Its values are names or ``Operation`` objects.
#
# The handlers are protected on each instance when it is made. So the position of the mixin among the bases does not
# matter, nor does an override of ``initial()`` or ``dispatch()``, and the class keeps its methods unchanged.
class IdempotentMixin:
    idempotent_operations: ClassVar[Mapping[str, str | Operation]] = {}
    _protected_handlers: ClassVar[dict[str, Protected]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._protected_handlers = {}
        if not isinstance(cls.idempotent_operations, Mapping):
            raise ImproperlyConfigured(
                f"{cls.__name__}.idempotent_operations must map the names of handlers to operations, not be "
                f"{cls.idempotent_operations!r}."
            )
        for name in cls.idempotent_operations:
            cls._declare(name)  # now, so that a mistake is found before the first request
        guard(cls)

    @classmethod
    def _declare(cls, name: str) -> None:
        if issubclass(cls, View) and not hasattr(cls, name):
            raise ImproperlyConfigured(
                f"{cls.__name__}.idempotent_operations names {name!r}, but {cls.__name__} has no such handler."
            )
        operation = operation_for(cls.idempotent_operations[name], {})
        refuse_handler(operation, cls, name)
        decorated = operation_of(getattr(cls, name, None))
        if decorated is not None and decorated.name != operation.name:
            raise ImproperlyConfigured(
                f"{cls.__name__}.idempotent_operations gives {name!r} to operation {operation.name!r}, but @idempotent "
                f"on the method gives it to {decorated.name!r}. Remove one of the two."
            )
        if "idempotent_operations" in vars(cls) and isinstance(cls.idempotent_operations[name], str):
            registry.bind(operation.name, [f"{base.__module__}.{base.__qualname__}.{name}" for base in cls.__mro__])

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # The arguments are meant for the view's __init__(). object.__new__() would refuse them.
        inherited: Callable[..., Any] = super().__new__
        view: Any = inherited(cls) if inherited is object.__new__ else inherited(cls, *args, **kwargs)
        for name in view.idempotent_operations:
            handler = getattr(cls, name, None)
            if handler is not None and operation_of(handler) is None:
                setattr(view, name, MethodType(view._protected(name, handler), view))
        made: Self = view
        return made

    @classmethod
    def idempotent_operation(cls, name: str) -> Operation | None:
        """The operation of the handler ``name``, or None if the mixin doesn't protect it."""
        declaration = cls.idempotent_operations.get(name)
        return None if declaration is None else operation_for(declaration, {})

    @classmethod
    def _protected(cls, name: str, handler: Callable[..., Any]) -> Protected:
        known = cls._protected_handlers.get(name)
        if known is None or known.view is not handler:  # made once per class, and again if the handler was replaced
            operation = operation_for(cls.idempotent_operations[name], {})
            known = cls._protected_handlers[name] = Protected(operation, handler)
            known.name = name
        return known
