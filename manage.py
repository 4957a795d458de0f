#!/usr/bin/env python
"""Django's command line for the sample project."""

from __future__ import annotations

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    try:
        import environ  # noqa: F401 - the settings import it, but an error there would be harder to understand
        from django.core.management import execute_from_command_line
    except ImportError as error:
        raise SystemExit(
            f"The sample project needs the package {error.name!r}. Install its dependencies with\n"
            "    python -m pip install -e . --group demo"
        ) from error
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
