"""ATOMIC_REQUESTS: which views are exempt from it, because this package opens the transactions itself.

The claim of a protected request must commit before the handler runs, and the outcome must be recorded after everything
that the handler wrote is committed. Neither is possible within a transaction around the whole view. So a view with a
protected handler is exempt from ATOMIC_REQUESTS on every database. ``handler.py`` opens the same transactions: around
the view if a request is not protected, and within the claim if it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db import connections

from .protection import layers_of


class EveryDatabase(set[str]):
    """The names of all databases. Django reads from this set on which databases a view is exempt.

    ``exempted`` has the databases on which the project itself has exempted the view. Django's ``non_atomic_requests``
    calls ``add()``.

    :param view: the view that opens the transactions itself. Decorators above it have this set as a copied attribute.
    """

    def __init__(self, view: object, exempted: Iterable[str] = ()) -> None:
        super().__init__(connections)
        self.view = view
        self.exempted = set(exempted)

    def add(self, using: str) -> None:
        self.exempted.add(using)


def opens_its_transactions(callback: object) -> bool:
    """Whether a call of ``callback`` leads to a view that is exempt because it opens the transactions itself."""
    exempt = getattr(callback, "_non_atomic_requests", None)
    return isinstance(exempt, EveryDatabase) and any(layer is exempt.view for layer in layers_of(callback))


def has_copied_exemption(callback: object) -> bool:
    """Whether ``callback`` is exempt like a view that opens the transactions itself, and doesn't lead to it."""
    is_exempt = isinstance(getattr(callback, "_non_atomic_requests", None), EveryDatabase)
    return is_exempt and not opens_its_transactions(callback)


def is_within_atomic_requests(callback: object) -> bool:
    """Whether Django opens a transaction around ``callback`` on some database."""
    return not set(databases_with_atomic_requests()) <= getattr(callback, "_non_atomic_requests", set())


def exempted_by_project(view: object) -> set[str]:
    """The databases on which the project has exempted ``view`` from ATOMIC_REQUESTS."""
    exempted: set[str] = getattr(view, "_non_atomic_requests", set())
    return exempted.exempted if isinstance(exempted, EveryDatabase) else set(exempted)


def databases_with_atomic_requests() -> list[str]:
    return [using for using, options in connections.settings.items() if options["ATOMIC_REQUESTS"]]
