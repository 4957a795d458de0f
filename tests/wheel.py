"""``python -m tests.wheel SOURCE``: the wheel is installed, and contains exactly the files in SOURCE."""

import sys
from importlib.metadata import files
from pathlib import Path

import idempotency


def main(source):
    installed = Path(idempotency.__file__).parent
    if "site-packages" not in installed.parts:
        raise SystemExit(f"idempotency was imported from {installed}, not from the wheel.")
    shipped = {path.as_posix() for path in files("django-idempotency") or []}
    strays = sorted(path for path in shipped if not path.startswith(("idempotency/", "django_idempotency-")))
    written = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = [
        str(path)
        for path in written
        if f"idempotency/{(inside := path.relative_to(source)).as_posix()}" not in shipped
        or (installed / inside).read_bytes() != path.read_bytes()
    ]
    packed = {f"idempotency/{path.relative_to(source).as_posix()}" for path in written}
    strays += sorted(path for path in shipped - packed if path.startswith("idempotency/") and ".pyc" not in path)
    if strays or missing:
        raise SystemExit(f"Unexpected files in the wheel: {strays}. Missing or changed files: {missing}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
