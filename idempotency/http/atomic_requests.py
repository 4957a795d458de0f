"""Views that open the transactions of ATOMIC_REQUESTS themselves.

A claim must commit before the handler runs, and the outcome must be recorded after all of the handler's writes are
committed. Neither is possible in a transaction around the whole view, so a view with a protected handler is exempt from
ATOMIC_REQUESTS on every database. ``handler.py`` opens the same transactions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from django.db import connections

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


def exempted_by_project(view: object) -> set[str]:
    """The databases on which the project has exempted ``view`` from ATOMIC_REQUESTS."""
    exempted: set[str] = getattr(view, "_non_atomic_requests", set())
    return exempted.exempted if isinstance(exempted, EveryDatabase) else set(exempted)


def databases_with_atomic_requests() -> list[str]:
    return [using for using, options in connections.settings.items() if options["ATOMIC_REQUESTS"]]
