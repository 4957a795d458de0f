"""Measures which method detects which bug: plants each core bug of ``mutants.toml``, and runs every method on it.

    python -m tools.methods --minutes 25       # as many as fit into 25 minutes, in random order
    python -m tools.methods --only NAME        # one bug; may be repeated

Each method runs in a reduced form, and stops at its first failure. Each result is added to ``RESULTS`` as a line.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.results import note
from tools.mutants import FAILED, LIST, PASSED, Mutant, copies, read_list, run_tests, write
from tools.reports import markdown, say

#: Files in which a bug may double an effect, lose one or return a wrong outcome.
CORE = (
    *("idempotency/lifecycle.py", "idempotency/operate/sweep.py", "idempotency/operate/resolutions.py"),
    *("idempotency/protocol/", "idempotency/store/portable.py", "idempotency/store/postgresql/statements.py"),
)
#: The reduced tests of each method. The named tests are those listed for the bug.
METHODS: dict[str, tuple[str, ...]] = {
    "named tests": (),
    "sequences": ("tests/database/test_stateful.py", "-k", "any_sequence or short_sequence"),
    "orders": ("tests/orders", "-k", "no_order and not REPEATABLE and not purge and not reconciler and not relays"),
    "matrix": ("tests/crash/test_matrix.py", "-k", "kill-inside or stop-live-inside or kill-park or stop-live-again"),
}
SEEN, UNSEEN, UNCLEAR = "seen", "–", "?"


def try_methods(mutant: Mutant, copy: Path, left: float) -> Iterator[tuple[str, str]]:
    """Each method and its verdict, until ``left`` seconds have passed."""
    path = copy / mutant.file
    sound, end = path.read_text(), time.monotonic() + left
    write(path, mutant.apply(copy))
    try:
        for method, tests in METHODS.items():
            if time.monotonic() > end:
                return
            yield method, verdict_of(mutant, copy, tests or mutant.tests)
    finally:
        write(path, sound)


def verdict_of(mutant: Mutant, copy: Path, tests: Sequence[str]) -> str:
    try:
        ended = run_tests(copy, ["-p", "no:randomly", *tests], mutant.database)
    except subprocess.TimeoutExpired:
        return UNCLEAR
    if "from pytest-timeout" in ended.stdout:
        return UNCLEAR  # the test may just have been slow
    return {PASSED: UNSEEN, FAILED: SEEN}.get(ended.returncode, UNCLEAR)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.methods", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="try this bug; may be repeated")
    parser.add_argument("--minutes", type=float, default=600, help="start no method after this many minutes")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs tried in parallel (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the bugs")
    options = parser.parse_args(arguments)
    bugs = [mutant for mutant in read_list(LIST.read_text()) if mutant.file.startswith(CORE)]
    bugs = [mutant for mutant in bugs if options.only is None or mutant.name in options.only]
    random.Random(options.seed).shuffle(bugs)
    begun, found = time.monotonic(), dict[str, dict[str, str]]()
    with copies(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:

        def attempt(mutant: Mutant) -> None:
            copy = free.get()
            try:
                for method, verdict in try_methods(mutant, copy, begun + options.minutes * 60 - time.monotonic()):
                    found.setdefault(mutant.name, {})[method] = verdict
                    say(f"{time.monotonic() - begun:5.0f} s  {mutant.name}, {method}: {verdict}")
                    note("method", bug=mutant.name, method=method, verdict=verdict, database=mutant.database)
            finally:
                free.put(copy)

        list(pool.map(attempt, bugs))
    say(table(found))
    return 0


def table(found: dict[str, dict[str, str]]) -> str:
    rows = [[name, *(verdicts.get(method, "") for method in METHODS)] for name, verdicts in sorted(found.items())]
    return markdown(["bug", *METHODS], rows)


if __name__ == "__main__":
    sys.exit(main())
