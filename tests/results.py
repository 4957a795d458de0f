"""Figures of runs: with ``RESULTS=FOLDER``, each adds a line to a file for the evidence page, even if it fails."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The environment variable in which the processes of pytest-xdist inherit the command.
COMMAND = "RESULTS_COMMAND"

#: Parts of the package that take no part in a request, a message or upkeep.
BESIDE = tuple(
    f"idempotency/{name}"
    for name in (
        *("admin", "testing", "templatetags", "checks.py", "views/checks.py", "views/route_audit.py"),
        *("contrib/celery/checks.py", "contrib/ninja.py", "contrib/openapi.py", "contrib/spectacular.py"),
        *("contrib/opentelemetry", "contrib/prometheus"),
    )
)
#: Parts that only requests pass.
EDGE = tuple(f"idempotency/{name}" for name in ("http", "views", "forms.py", "middleware.py", "contrib/rest_framework"))
#: Tests of the harness, and other tests in its folders.
OTHERS = (
    *(f"tests/harness/test_{name}.py" for name in ("cut_off", "history", "judges", "processes")),
    *("tests/crash/test_gunicorn.py", "tests/crash/test_pgbouncer.py", "tests/http/test_forms.py"),
    *(f"tests/conformance/{name}.py" for name in ("settings", "test_sample_project", "urls")),
)
SOURCES = {".py", ".pml", ".c", ".js", ".json"}


@dataclass(frozen=True)
class Subject:
    """The files that decide the result of a run: those that it passes, and its harness. Names are below the root."""

    harness: tuple[str, ...]
    #: New files of the package decide every run, until they are left out.
    package: tuple[str, ...] = ("idempotency",)
    but: tuple[str, ...] = BESIDE

    def files(self, root=ROOT):
        left_out = tuple(f"{root / name}" for name in (*self.but, *OTHERS))
        for name in (*self.package, *self.harness):
            place = root / name
            for file in [place] if place.is_file() else place.rglob("*.*"):
                if file.suffix in SOURCES and not str(file).startswith(left_out):
                    yield file


#: What processes of the harness share, and what tests of one process share.
PROCESSES = ("tests/harness", "testproject")
TESTS = tuple(f"tests/{name}.py" for name in ("aliases", "operations", "outbox", "providers", "records", "tables"))
TESTS += ("tests/crash/mutations.py", "testproject")
_SEQUENCES = (*TESTS, "tests/database/claiming.py", "tests/database/test_stateful.py")
_ORDERS = (*TESTS, "tests/harness/answers.py", "tests/model/moves.py", "tests/orders")
_CRASHES = (*PROCESSES, "tests/crash")
_FUZZ = (
    *(*TESTS, "tests/contrib/consumers.py", "tests/contrib/deliveries.py", "tests/contrib/test_fuzz.py"),
    *(f"tests/http/{name}.py" for name in ("callers", "conftest", "serving", "test_fuzz", "views")),
    *("tests/http/admin/pages.py", "tests/http/admin/test_hostile_input.py", "tests/factories.py"),
    *("tests/concurrency/failures.py", "tests/concurrency/racing.py", "tests/harness"),
)
_SUITE = ("tools/conformance/src", "tests/conformance", "testproject/harness")
#: By the kinds of runs.
SUBJECTS = {
    **dict.fromkeys(("matrix", "stops", "cuts", "failover"), Subject((*_CRASHES, "tools/crashes.py"))),
    **dict.fromkeys(("orders", "walks"), Subject(_ORDERS)),
    "sequences": Subject(_SEQUENCES, but=(*BESIDE, *EDGE)),
    "model": Subject(("tests/model",), tuple(f"idempotency/{name}" for name in ("lifecycle.py", "protocol", "store"))),
    "deliveries": Subject((*PROCESSES, "tests/delivery", "tools/deliveries.py")),
    "soak": Subject((*PROCESSES, "tests/soak", "tests/crash/storms.py", "tools/soak.py")),
    "fuzz": Subject(_FUZZ, but=()),
    "guided": Subject(("tests/unit/test_guided.py",), ("idempotency/identity", "idempotency/exceptions.py")),
    "method": Subject((*_CRASHES, *_ORDERS, *_SEQUENCES, "tools/methods.py", "tools/mutants.py")),
    "tests": Subject(("tests", "testproject", "tools"), but=()),
    "conformance": Subject(_SUITE),
    # Rows of other packages.
    "comparison": Subject(_SUITE, ()),
    "costs": Subject((*PROCESSES, "tests/database/processes.py", "tools/benchmarks")),
}


def subject_of(line):
    """The name of what a line's run judged: its kind, or a part of it."""
    kind = line["what"].partition(":")[0]
    if kind == "conformance" and line["version"] != "this checkout":
        return "comparison"
    return line["kind"] if kind == "mutation" else kind


def digest_of(subject, root=ROOT):
    """A digest of the files that decide a run's result. A result with a different digest is older than the files.

    :param subject: a name of ``SUBJECTS``, or a folder of mutants.
    """
    files = (SUBJECTS[subject] if subject in SUBJECTS else Subject((subject,), ())).files(root)
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def note(what, **figures):
    """Add a run's result. Without ``RESULTS``, nothing is written."""
    if folder := os.environ.get("RESULTS"):
        line = {
            "what": what,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": _commit(),
            "judged": digest_of(subject_of({"what": what, **figures})),
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
    """The checked out commit, with a + if files that decide a result have changed since."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    changes = [*git, "status", "--porcelain", "idempotency", "tests", "testproject", "tools", ":!tools/evidence"]
    changed = subprocess.run(changes, capture_output=True, text=True, check=False).stdout
    return head.stdout.strip() + "+" * bool(changed)


def command():
    """The command of this process."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "") if sys.modules["__main__"].__spec__ else ""
    return shlex.join(["python", "-m", module.removesuffix(".__main__"), *sys.argv[1:]])
