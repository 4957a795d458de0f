"""A stand-in for the payment provider that a real payments API calls: a process of its own with a ledger of its own.

It uses neither Django nor the package. Unless it is told to deduplicate, each request that reaches it pays. So its
ledger shows what would have happened in the outside world.

``ledger`` records the effects, ``server`` is the HTTP interface with its faults, ``process`` runs it for the demo and
the tests, and ``__main__`` is its command line.
"""

from .ledger import Effect, read_ledger
from .process import Provider, running_provider, running_providers

__all__ = ["Effect", "Provider", "read_ledger", "running_provider", "running_providers"]
