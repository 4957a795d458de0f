"""How a function under DRF's ``@api_view`` reaches the class that ``@api_view`` makes of it. Imports nothing of DRF."""

from __future__ import annotations

from ..operation import Operation
from .class_views import guard


class Docstring(str):  # noqa: SLOT000 - one instance a view, and it carries an attribute
    """The docstring of a function under ``@idempotent``, which tells of the class that it is put into.

    ``@api_view`` makes a class that calls the function, and puts nothing of the function into the class's body but the
    docstring. A value in a class body is told of its owner (``object.__set_name__``), and the owner is what must be
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
