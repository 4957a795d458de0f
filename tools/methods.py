"""Measures which method detects which bug: plants each core bug of ``mutants.toml``, and runs every method on it.

    python -m tools.methods --minutes 25       # as many as fit into 25 minutes, in random order
    python -m tools.methods --only NAME        # one bug; may be repeated

Each method runs in a reduced form, and stops at its first failure. Each result is added to ``RESULTS`` as a line.
All bugs share a PostgreSQL server. One pytest collects the tests of a bug, and forks for each method.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from testproject.embedded import embedded_postgres
from tests.results import note
from tools.mutants import FAILED, LIST, PASSED, Mutant, copies, read_list, run_tests, write
from tools.reports import markdown, say

if TYPE_CHECKING:
    import pytest  # the build of the documentation imports this module without it

#: Files in which a bug may double an effect, lose one or return a wrong outcome.
CORE = (
    *("idempotency/lifecycle.py", "idempotency/operate/sweep.py", "idempotency/operate/resolutions.py"),
    *("idempotency/protocol/", "idempotency/store/portable.py", "idempotency/store/postgresql/statements.py"),
)
NAMED = "named tests"
#: The file of each method, and the ids of its reduced tests. They are the cheapest that detect what a longer list does.
METHODS: dict[str, tuple[str, str]] = {
    NAMED: ("", ""),
    "sequences": ("tests/database/test_stateful.py", r"any_sequence|short_sequence.*\[again\]"),
    "orders": (
        "tests/orders/test_orders.py",
        r"\[(two requests-inside|a take-over-(inside|again)|an operator.*-inside|a sweep-park)-nothing-(READ_C.*)?\]",
    ),
    "matrix": ("tests/crash/test_matrix.py", r"\[(kill-inside|stop-live-again)\]"),
}
SEEN, UNSEEN, UNCLEAR = "seen", "–", "?"
VERDICTS = {PASSED: UNSEEN, FAILED: SEEN}


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As a plugin of pytest: fork for each method. The child runs its tests, as if no others were collected."""
    terminal = session.config.get_terminal_writer()
    by_method: dict[str, list[pytest.Item]] = {method: [] for method in METHODS}
    for item in session.items:
        file = item.nodeid.partition("::")[0]
        method = next((method for method, (path, _) in METHODS.items() if path == file), NAMED)
        if re.search(METHODS[method][1], item.nodeid):
            by_method[method].append(item)
    for method, items in by_method.items():
        if not items:
            continue  # its verdict is unclear
        terminal.flush()
        if not (child := os.fork()):
            session.items = items
            return None
        terminal.line(f"\n{method} = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    return True


def try_methods(mutant: Mutant, copy: Path, server: str) -> Iterator[tuple[str, str]]:
    """Each method and its verdict."""
    path = copy / mutant.file
    sound = path.read_text()
    tests = ["-p", "no:randomly", "-p", "tools.methods", *mutant.tests, *(path for path, _ in METHODS.values() if path)]
    write(path, mutant.apply(copy))
    try:
        with tempfile.TemporaryDirectory(prefix="methods-") as folder:
            url = server if mutant.database == "postgres" else f"sqlite:///{folder}/db.sqlite3"
            output = run_tests(copy, tests, mutant.database, url).stdout
    except subprocess.TimeoutExpired as error:
        output = str(error.output or b"", "utf-8", "replace")
    finally:
        write(path, sound)
    for method in METHODS:
        before, _, ended = output.partition(f"\n{method} = ")
        code = int(ended.partition("\n")[0] or -1)
        # After a timeout, the test may just have been slow.
        yield method, UNCLEAR if "from pytest-timeout" in before else VERDICTS.get(code, UNCLEAR)
        output = ended or output


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.methods", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="try this bug; may be repeated")
    parser.add_argument("--minutes", type=float, default=600, help="start no bug after this many minutes")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs tried in parallel (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the bugs")
    options = parser.parse_args(arguments)
    bugs = [mutant for mutant in read_list(LIST.read_text()) if mutant.file.startswith(CORE)]
    bugs = [mutant for mutant in bugs if options.only is None or mutant.name in options.only]
    random.Random(options.seed).shuffle(bugs)
    begun, found = time.monotonic(), dict[str, dict[str, str]]()
    with (
        embedded_postgres({"fsync": "off"}) as server,
        copies(options.jobs) as free,
        ThreadPoolExecutor(options.jobs) as pool,
    ):

        def attempt(mutant: Mutant) -> None:
            if time.monotonic() > begun + options.minutes * 60:
                return
            copy = free.get()
            try:
                found[mutant.name] = dict(try_methods(mutant, copy, server))
            finally:
                free.put(copy)
            say(f"{time.monotonic() - begun:5.0f} s  {mutant.name}: {found[mutant.name]}")
            for method, verdict in found[mutant.name].items():
                note("method", bug=mutant.name, method=method, verdict=verdict, database=mutant.database)

        list(pool.map(attempt, bugs))
    say(table(found))
    return 0


def table(found: dict[str, dict[str, str]]) -> str:
    rows = [[name, *(verdicts.get(method, "") for method in METHODS)] for name, verdicts in sorted(found.items())]
    return markdown(["bug", *METHODS], rows)


if __name__ == "__main__":
    sys.exit(main())
