"""Finds the class that DRF's ``@api_view`` makes from a function under ``@idempotent``, without importing DRF."""

from __future__ import annotations

from ..operation import Operation
from .class_views import guard


class Docstring(str):  # noqa: SLOT000 - one instance per view, with an attribute
    """The docstring of a function under ``@idempotent``. It guards the class that it is put into.

    ``@api_view`` makes a class that calls the function. The only part of the function that it puts into the class body
    is the docstring. Python calls ``__set_name__`` of each value in a class body with the class, and that class must be
    guarded.
    """

    operation: Operation

    def __set_name__(self, owner: type, name: str) -> None:
        owner.idempotent_function = self.operation  # type: ignore[attr-defined]
        guard(owner)


def docstring_of(view: object, operation: Operation) -> Docstring:
    docstring = Docstring(view.__doc__ or "")
    docstring.operation = operation
    return docstring
