"""Integrations with other packages, each with its own extra in ``pyproject.toml``. The core needs none of them.

To add a web framework, register a subclass of ``http.adapter.Adapter`` here. The package's ``apps.py`` imports the
modules of the frameworks in ``INSTALLED_APPS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """If an import in the block fails, name the extra that installs the library."""
    try:
        yield
    except ImportError as error:
        install = f"python -m pip install 'django-idempotency[{extra}]'"
        raise ImportError(f"{error}. Install it with\n    {install}") from error
