"""A stand-in for a payment provider: a separate process with its own ledger.

It uses neither Django nor the package. Unless it deduplicates, every request that reaches it pays, so its ledger shows
all external effects.

``ledger`` records the effects, ``server`` is the HTTP interface with its faults, ``process`` runs it for the demo and
the tests, and ``__main__`` is its command line.
"""

from .ledger import Effect, read_ledger
from .process import Provider, running_provider, running_providers

__all__ = ["Effect", "Provider", "read_ledger", "running_provider", "running_providers"]
