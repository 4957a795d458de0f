"""Figures of runs: with ``RESULTS=FOLDER``, each adds a line to a file for the evidence page, even if it fails."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "idempotency"
CORE = ("lifecycle.py", "outcome.py", "models.py", "protocol", "store", "operate")
#: The environment variable in which the processes of pytest-xdist inherit the command.
COMMAND = "RESULTS_COMMAND"
#: The parts of the package that a kind of run judges, if not the core.
JUDGED = {"fuzz": ("http", "contrib", "identity"), "guided": ("identity",), "conformance": ("",)}


def judged(kind, folder=None):
    """A digest of the files that a kind of run judges. A result with a different digest is of older code.

    :param folder: of mutants.
    """
    places = [ROOT / folder] if folder else [PACKAGE / name for name in JUDGED.get(kind, CORE)]
    files = sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def note(what, **figures):
    """Add a run's result. Without ``RESULTS``, nothing is written."""
    if folder := os.environ.get("RESULTS"):
        line = {
            "what": what,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": _commit(),
            "judged": judged(what.partition(":")[0], figures["kind"] if what == "mutation" else None),
            "command": os.environ[COMMAND] if "PYTEST_XDIST_WORKER" in os.environ else command(),
            **figures,
        }
        with Path(folder, "results.jsonl").open("a", encoding="utf-8") as results:
            results.write(json.dumps(line) + "\n")


@contextmanager
def recording(what, **figures):
    """Add the result of the block, which fills in the figures. Its first AssertionError ends it as one violation."""
    try:
        yield figures
    except AssertionError as error:
        note(what, **{"violations": 1, **figures}, failed=str(error)[:300])
        raise
    note(what, **{"violations": 0, **figures})


def _commit():
    """The checked out commit, with a + if the package or the tests have changed since."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    changes = [*git, "status", "--porcelain", "idempotency", "tests", "testproject"]
    changed = subprocess.run(changes, capture_output=True, text=True, check=False).stdout
    return head.stdout.strip() + "+" * bool(changed)


def command():
    """The command of this process."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "") if sys.modules["__main__"].__spec__ else ""
    return shlex.join(["python", "-m", module.removesuffix(".__main__"), *sys.argv[1:]])
