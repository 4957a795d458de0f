"""``python -m tests.wheel``: the installed package is the wheel, and the wheel holds the package and nothing else."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

import idempotency

REQUIRED = ("idempotency/py.typed", "idempotency/migrations/0001_initial.py")


def main() -> None:
    checkout = Path(__file__).parents[1]
    if Path(idempotency.__file__).is_relative_to(checkout):
        raise SystemExit(f"idempotency was imported from {idempotency.__file__}, not from the wheel.")
    shipped = [path.as_posix() for path in files("django-idempotency") or []]
    strays = [path for path in shipped if not path.startswith(("idempotency/", "django_idempotency-"))]
    missing = [path for path in REQUIRED if path not in shipped]
    if strays or missing:
        raise SystemExit(f"The wheel ships what it should not: {strays}; and lacks: {missing}.")


if __name__ == "__main__":
    main()
