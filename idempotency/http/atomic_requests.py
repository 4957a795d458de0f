"""Views that open the transactions of ATOMIC_REQUESTS themselves.

A claim must commit before the handler runs, and the outcome must be recorded after all of the handler's writes are
committed. Neither is possible in a transaction around the whole view, so a view with a protected handler is exempt from
ATOMIC_REQUESTS on every database. For unprotected requests ``handler.py`` opens the same transactions. A protected
request runs in the operation's transaction, and is refused if it would lose one on another database.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from django.db import connections

from ..operation import Operation
from .stack import decorator_stack


class EveryDatabase(set[str]):
    """The names of all databases, as the set of databases on which Django exempts a view.

    :param view: the view that opens the transactions itself. Decorators above it have a copy of the attribute.
    :param exempted: the databases that the project exempted. Django's ``non_atomic_requests`` calls ``add()``.
    """

    def __init__(self, view: object, exempted: Iterable[str] = ()) -> None:
        super().__init__(connections)
        self.view = view
        self.exempted: Final = set(exempted)

    def add(self, using: str) -> None:
        self.exempted.add(using)


def opens_its_transactions(callback: object) -> bool:
    """Whether ``callback`` calls a view that is exempt because it opens the transactions itself."""
    exemption = getattr(callback, "_non_atomic_requests", None)
    return isinstance(exemption, EveryDatabase) and any(layer is exemption.view for layer in decorator_stack(callback))


def is_within_atomic_requests(callback: object) -> bool:
    """Whether Django opens a transaction around ``callback`` on any database."""
    return not set(databases_with_atomic_requests()) <= getattr(callback, "_non_atomic_requests", set())


def opened_here(callback: object) -> list[str]:
    """The databases on which this package opens the transaction of ATOMIC_REQUESTS in place of Django."""
    exemption = getattr(callback, "_non_atomic_requests", None)
    if not isinstance(exemption, EveryDatabase):
        return []
    return [using for using in databases_with_atomic_requests() if using not in exemption.exempted]


def beside_records(operation: Operation, using: str) -> str:
    """Why requests under ``operation`` are refused if ``opened_here()`` names a database without its records."""
    return (
        f"ATOMIC_REQUESTS of database {using!r} can't apply to {operation}, whose records are elsewhere: a crash "
        f"between the two commits would leave an effect without its outcome. Mark the view with "
        f"django.db.transaction.non_atomic_requests(using={using!r}), and open atomic(using={using!r}) around the "
        f"handler's writes to it."
    )


def exempted_by_project(view: object) -> set[str]:
    """The databases on which the project has exempted ``view`` from ATOMIC_REQUESTS."""
    exempted: set[str] = getattr(view, "_non_atomic_requests", set())
    return exempted.exempted if isinstance(exempted, EveryDatabase) else set(exempted)


def databases_with_atomic_requests() -> list[str]:
    return [using for using, options in connections.settings.items() if options["ATOMIC_REQUESTS"]]
