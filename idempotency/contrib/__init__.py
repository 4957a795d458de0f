"""Integrations with other packages. Each has its own extra in ``pyproject.toml``; the core needs none of them.

To add a web framework, write a subclass of ``http.adapter.Adapter`` here and register it. The package's ``apps.py``
imports the modules of frameworks that are in ``INSTALLED_APPS``; nothing else below this folder does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """If an import of the block fails, say which extra has the library."""
    try:
        yield
    except ImportError as error:
        install = f"python -m pip install 'django-idempotency[{extra}]'"
        raise ImportError(f"{error}. Install it with\n    {install}") from error
